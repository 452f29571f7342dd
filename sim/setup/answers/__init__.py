"""How answers are worded and laid out: sentences, tables, figures."""
