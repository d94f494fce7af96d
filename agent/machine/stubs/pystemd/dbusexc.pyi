class DBusBaseError(Exception):
    errno: int
    err_name: bytes | str
    err_message: bytes | str

def DBusError(
    errno: int, err_name: bytes | str | None, err_message: bytes | str | None
) -> DBusBaseError: ...
