"""What is measured, and how: kernels, links, copies, and what slows what down."""
