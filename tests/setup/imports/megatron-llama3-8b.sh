#!/bin/bash
# Made after Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh, in bf16.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}
CP_SIZE=8
SEQ_LENGTH=131072
DATA_ARGS_LIST=(--mock-data --tokenizer-type NullTokenizer --split '99,1,0')

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank ${NODE_RANK:-0}
    --master_addr ${MASTER_ADDR:-localhost}
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $SEQ_LENGTH
    --max-position-embeddings $SEQ_LENGTH
    --position-embedding-type rope
    --rotary-base 1000000
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --normalization RMSNorm
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)
TRAINING_ARGS="--micro-batch-size 1 --global-batch-size 8 --lr 1.5e-4 --bf16 --train-samples 1000 \
    --cross-entropy-loss-fusion --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --context-parallel-size $CP_SIZE
    --cp-comm-type p2p
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
if [ -n "$DRY_RUN" ]; then echo "dry"; fi
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" ${TRAINING_ARGS} "${PARALLEL_ARGS[@]}" \
    "${DATA_ARGS_LIST[@]}"
