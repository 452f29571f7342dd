#!/bin/bash
# Made after Megatron-Bridge's scripts: a recipe with overrides.
SEQ=65536
torchrun --nproc_per_node 8 run_recipe.py hf_model_id=meta-llama/Meta-Llama-3-8B \
  model.seq_length=$SEQ dataset.sequence_length=$SEQ \
  model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=1 \
  model.context_parallel_size=8 model.cp_comm_type=a2a \
  model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1 \
  train.global_batch_size=4 train.micro_batch_size=1 train.train_iters=100 \
  ddp.use_distributed_optimizer=true ddp.overlap_grad_reduce=true ddp.grad_reduce_in_fp32=true \
  mixed_precision=bf16_mixed
