"""The one error a user is meant to read: what is wrong, where, and what to do."""


class UserError(Exception):
    """A mistake in what the user gave us: shown as one line, exit code 2 (or HTTP 400), never as a traceback.

    Args:
        what: the fault, with the two values that disagree.
        where: the file, tensor, flag or field it was found in.
        do: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do
        parts = [f"{where}: {what}" if where else what, do]
        super().__init__("; ".join(part for part in parts if part))
