"""Parameters by path: nested dicts, as flax has them, to and from {'a/b/c': leaf}."""

import functools

from flax.traverse_util import flatten_dict, unflatten_dict

flatten = functools.partial(flatten_dict, sep="/")
unflatten = functools.partial(unflatten_dict, sep="/")
