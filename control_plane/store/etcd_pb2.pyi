from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper

DESCRIPTOR: _descriptor.FileDescriptor

class ResponseHeader(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: int | None = ...) -> None: ...

class KeyValue(_message.Message):
    __slots__ = ("create_revision", "key", "mod_revision", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CREATE_REVISION_FIELD_NUMBER: _ClassVar[int]
    MOD_REVISION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    create_revision: int
    mod_revision: int
    value: bytes
    def __init__(
        self,
        key: bytes | None = ...,
        create_revision: int | None = ...,
        mod_revision: int | None = ...,
        value: bytes | None = ...,
    ) -> None: ...

class RangeRequest(_message.Message):
    __slots__ = ("key", "limit", "range_end", "revision")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANGE_END_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    range_end: bytes
    limit: int
    revision: int
    def __init__(
        self,
        key: bytes | None = ...,
        range_end: bytes | None = ...,
        limit: int | None = ...,
        revision: int | None = ...,
    ) -> None: ...

class RangeResponse(_message.Message):
    __slots__ = ("header", "kvs", "more")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KVS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    header: ResponseHeader
    kvs: _containers.RepeatedCompositeFieldContainer[KeyValue]
    more: bool
    def __init__(
        self,
        header: ResponseHeader | _Mapping | None = ...,
        kvs: _Iterable[KeyValue | _Mapping] | None = ...,
        more: bool = ...,
    ) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("key", "lease", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    value: bytes
    lease: int
    def __init__(
        self, key: bytes | None = ..., value: bytes | None = ..., lease: int | None = ...
    ) -> None: ...

class DeleteRangeRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: bytes | None = ...) -> None: ...

class RequestOp(_message.Message):
    __slots__ = ("request_delete_range", "request_put", "request_range")
    REQUEST_RANGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PUT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DELETE_RANGE_FIELD_NUMBER: _ClassVar[int]
    request_range: RangeRequest
    request_put: PutRequest
    request_delete_range: DeleteRangeRequest
    def __init__(
        self,
        request_range: RangeRequest | _Mapping | None = ...,
        request_put: PutRequest | _Mapping | None = ...,
        request_delete_range: DeleteRangeRequest | _Mapping | None = ...,
    ) -> None: ...

class ResponseOp(_message.Message):
    __slots__ = ("response_range",)
    RESPONSE_RANGE_FIELD_NUMBER: _ClassVar[int]
    response_range: RangeResponse
    def __init__(self, response_range: RangeResponse | _Mapping | None = ...) -> None: ...

class Compare(_message.Message):
    __slots__ = ("create_revision", "key", "mod_revision", "result", "target")
    class CompareResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EQUAL: _ClassVar[Compare.CompareResult]

    EQUAL: Compare.CompareResult
    class CompareTarget(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERSION: _ClassVar[Compare.CompareTarget]
        CREATE: _ClassVar[Compare.CompareTarget]
        MOD: _ClassVar[Compare.CompareTarget]

    VERSION: Compare.CompareTarget
    CREATE: Compare.CompareTarget
    MOD: Compare.CompareTarget
    RESULT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CREATE_REVISION_FIELD_NUMBER: _ClassVar[int]
    MOD_REVISION_FIELD_NUMBER: _ClassVar[int]
    result: Compare.CompareResult
    target: Compare.CompareTarget
    key: bytes
    create_revision: int
    mod_revision: int
    def __init__(
        self,
        result: Compare.CompareResult | str | None = ...,
        target: Compare.CompareTarget | str | None = ...,
        key: bytes | None = ...,
        create_revision: int | None = ...,
        mod_revision: int | None = ...,
    ) -> None: ...

class TxnRequest(_message.Message):
    __slots__ = ("compare", "failure", "success")
    COMPARE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    compare: _containers.RepeatedCompositeFieldContainer[Compare]
    success: _containers.RepeatedCompositeFieldContainer[RequestOp]
    failure: _containers.RepeatedCompositeFieldContainer[RequestOp]
    def __init__(
        self,
        compare: _Iterable[Compare | _Mapping] | None = ...,
        success: _Iterable[RequestOp | _Mapping] | None = ...,
        failure: _Iterable[RequestOp | _Mapping] | None = ...,
    ) -> None: ...

class TxnResponse(_message.Message):
    __slots__ = ("header", "responses", "succeeded")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    header: ResponseHeader
    succeeded: bool
    responses: _containers.RepeatedCompositeFieldContainer[ResponseOp]
    def __init__(
        self,
        header: ResponseHeader | _Mapping | None = ...,
        succeeded: bool = ...,
        responses: _Iterable[ResponseOp | _Mapping] | None = ...,
    ) -> None: ...

class CompactionRequest(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: int | None = ...) -> None: ...

class CompactionResponse(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: ResponseHeader
    def __init__(self, header: ResponseHeader | _Mapping | None = ...) -> None: ...

class WatchCreateRequest(_message.Message):
    __slots__ = ("key", "range_end", "start_revision")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANGE_END_FIELD_NUMBER: _ClassVar[int]
    START_REVISION_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    range_end: bytes
    start_revision: int
    def __init__(
        self,
        key: bytes | None = ...,
        range_end: bytes | None = ...,
        start_revision: int | None = ...,
    ) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("create_request",)
    CREATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    create_request: WatchCreateRequest
    def __init__(self, create_request: WatchCreateRequest | _Mapping | None = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kv", "type")
    class EventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PUT: _ClassVar[Event.EventType]
        DELETE: _ClassVar[Event.EventType]

    PUT: Event.EventType
    DELETE: Event.EventType
    TYPE_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    type: Event.EventType
    kv: KeyValue
    def __init__(
        self, type: Event.EventType | str | None = ..., kv: KeyValue | _Mapping | None = ...
    ) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("cancel_reason", "canceled", "compact_revision", "created", "events", "header")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CANCELED_FIELD_NUMBER: _ClassVar[int]
    COMPACT_REVISION_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REASON_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    header: ResponseHeader
    created: bool
    canceled: bool
    compact_revision: int
    cancel_reason: str
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(
        self,
        header: ResponseHeader | _Mapping | None = ...,
        created: bool = ...,
        canceled: bool = ...,
        compact_revision: int | None = ...,
        cancel_reason: str | None = ...,
        events: _Iterable[Event | _Mapping] | None = ...,
    ) -> None: ...

class LeaseGrantRequest(_message.Message):
    __slots__ = ("TTL",)
    TTL_FIELD_NUMBER: _ClassVar[int]
    TTL: int
    def __init__(self, TTL: int | None = ...) -> None: ...

class LeaseGrantResponse(_message.Message):
    __slots__ = ("ID", "TTL")
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    ID: int
    TTL: int
    def __init__(self, ID: int | None = ..., TTL: int | None = ...) -> None: ...

class LeaseRevokeRequest(_message.Message):
    __slots__ = ("ID",)
    ID_FIELD_NUMBER: _ClassVar[int]
    ID: int
    def __init__(self, ID: int | None = ...) -> None: ...

class LeaseRevokeResponse(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: ResponseHeader
    def __init__(self, header: ResponseHeader | _Mapping | None = ...) -> None: ...

class LeaseKeepAliveRequest(_message.Message):
    __slots__ = ("ID",)
    ID_FIELD_NUMBER: _ClassVar[int]
    ID: int
    def __init__(self, ID: int | None = ...) -> None: ...

class LeaseKeepAliveResponse(_message.Message):
    __slots__ = ("ID", "TTL")
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    ID: int
    TTL: int
    def __init__(self, ID: int | None = ..., TTL: int | None = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("dbSize", "version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DBSIZE_FIELD_NUMBER: _ClassVar[int]
    version: str
    dbSize: int
    def __init__(self, version: str | None = ..., dbSize: int | None = ...) -> None: ...
