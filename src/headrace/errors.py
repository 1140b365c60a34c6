"""Every error that Headrace raises on purpose.

HeadraceError
├── SettingsError        (ValueError)         an argument that cannot work
│   └── FieldError       (KeyError)           a field that does not exist, or has another kind
├── DatasetNotFoundError (FileNotFoundError)  there is nothing to open at that path
├── FormatError          (ValueError)         bytes that do not follow the format
│   ├── VersionError                          written by a newer or older Headrace
│   ├── CorruptError                          sizes or checksums that do not match
│   └── RebuiltError                          the version that was opened is gone: the dataset was built again
├── StorageError         (OSError)            the disk is full, a file cannot be read
├── MissingExtraError    (ImportError)        an optional package is not installed
├── StateError           (ValueError)         the saved state belongs to another stream
├── StageError           (RuntimeError)       a stage of the pipeline failed: the original error is its cause
│   └── StageTimeoutError (TimeoutError)      a stage took longer than its deadline
├── TargetError          (RuntimeError)       the program to measure failed, or produced nothing
└── BuildError           (RuntimeError)       a build that cannot continue
    ├── BadRecordsError  (ValueError)         more bad records than allowed
    ├── SettingsChangedError (ValueError)     the dataset was built with other settings
    ├── UnfinishedBuildError                  a build was started here and has not finished
    └── DirectoryInUseError  (BlockingIOError)    another build holds the directory

Each one is also the builtin in brackets, so `except ValueError` does what people expect.
Messages say what was wrong, what was found, and what to do.
"""


class HeadraceError(Exception):
    def __str__(self) -> str:
        # KeyError and OSError add quotes and codes to their messages; ours are complete already.
        return str(self.args[0]) if self.args else ""


class SettingsError(HeadraceError, ValueError):
    pass


class FieldError(SettingsError, KeyError):
    pass


class DatasetNotFoundError(HeadraceError, FileNotFoundError):
    pass


class FormatError(HeadraceError, ValueError):
    pass


class VersionError(FormatError):
    pass


class CorruptError(FormatError):
    pass


class RebuiltError(FormatError):
    pass


class StorageError(HeadraceError, OSError):
    pass


class MissingExtraError(HeadraceError, ImportError):
    pass


def how_to_install(extra: str) -> str:
    """The command that installs optional packages, from a package index and from a clone."""
    return f"pip install 'headrace[{extra}]', or pip install -e '.[{extra}]' in a clone"


class StateError(HeadraceError, ValueError):
    pass


class StageError(HeadraceError, RuntimeError):
    pass


class StageTimeoutError(StageError, TimeoutError):
    pass


class TargetError(HeadraceError, RuntimeError):
    pass


class BuildError(HeadraceError, RuntimeError):
    pass


class BadRecordsError(BuildError, ValueError):
    pass


class SettingsChangedError(BuildError, ValueError):
    pass


class UnfinishedBuildError(BuildError):
    pass


class DirectoryInUseError(BuildError, BlockingIOError):
    pass
