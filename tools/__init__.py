"""Programs of the build; run from the root of the repository."""
