"""A build's training rows in the forms that trainers of drafters read. docs/export.md says what each is held to."""
