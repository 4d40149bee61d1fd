"""Running a transformers model's attention with regard: install, register, uninstall."""
