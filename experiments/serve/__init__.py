"""A local page to think with: questions by form, answers as they change."""
