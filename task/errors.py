"""Exceptions of models and data."""


class TaskError(ValueError):
    """A task that cannot be used; the text says what it lacks."""


class DatasetNotFoundError(FileNotFoundError):
    """A dataset is in none of the places that were looked at."""


class DatasetFileError(ValueError):
    """A dataset file is there but is not what its name promises."""


class ShardFileError(ValueError):
    """A node's own data file cannot be used for training."""


class OutOfMemoryError(RuntimeError):
    """The device has too little memory; the server knows it by this name, and waits for a while."""


class CacheError(OSError):
    """The cache folder cannot be written or keeps being damaged."""
