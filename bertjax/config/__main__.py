"""python -m bertjax.config > docs/settings.md: the page of all settings."""

from bertjax.config.describe import page
from bertjax.interruption import refusals

if __name__ == "__main__":
    with refusals("config"):
        print(page(), end="")
