class DBusBaseError(Exception):
    errno: int
    err_name: bytes | str
    err_message: bytes | str
