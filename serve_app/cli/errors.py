"""What can go wrong in a command, as one line that says what to do."""

from __future__ import annotations


class CommandError(Exception):
    """A command that can't be done. `message` is for the operator; `code` is a fixed word for scripts.

    `status` and `request_id` come from the service's answer where there was one.
    """

    def __init__(
        self, message: str, *, code: str, status: int | None = None, request_id: str | None = None, exit_code: int = 1
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.request_id = request_id
        self.exit_code = exit_code

    def document(self) -> dict[str, object]:
        """The failure as `--json` prints it on standard error."""
        error: dict[str, object] = {"message": self.message, "code": self.code}
        if self.status is not None:
            error["status"] = self.status
        if self.request_id is not None:
            error["request_id"] = self.request_id
        return {"error": error}


def usage_error(message: str) -> CommandError:
    """A command line that can't be meant: exit code 2, like an unknown option."""
    return CommandError(message, code="usage", exit_code=2)
