class NetlinkError(Exception):
    code: int
