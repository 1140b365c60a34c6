"""The error for more unreadable records than may be left out."""

from headrace.errors import BadRecordsError


def encodable(text: str) -> str:
    """The text with lone surrogates written out: JSON keys may contain them, but messages are sent as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def too_many_bad(count: int, allowed: int, latest: str, remedy: str) -> BadRecordsError:
    """`remedy` is a whole sentence, without the full stop."""
    records = "1 record" if count == 1 else f"{count:,} records"
    return BadRecordsError(
        f"{records} could not be read, and max_bad_records is {allowed}. The latest: {latest}. {remedy}"
    )
