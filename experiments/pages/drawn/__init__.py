"""What pages are drawn with: plots, charts, tables, and the templates that hold them."""
