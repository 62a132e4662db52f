"""The settings by subject: each file a group of flags; `core/settings.py` joins them in the order of --help."""
