"""python -m bertjax.config > docs/settings.md: the page of all settings."""

from bertjax.config.describe import page

if __name__ == "__main__":
    print(page(), end="")
