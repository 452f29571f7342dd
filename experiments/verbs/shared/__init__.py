"""What verbs share: options that choose cells, and what terminals show."""
