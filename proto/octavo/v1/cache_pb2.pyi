from octavo.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_NEW: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_OTHER_SALT: _ClassVar[MissReason]
    MISS_REASON_LAST_TOKEN: _ClassVar[MissReason]
    MISS_REASON_PARTIAL_PAGE: _ClassVar[MissReason]
    MISS_REASON_DISABLED: _ClassVar[MissReason]
    MISS_REASON_OTHER_FORMAT: _ClassVar[MissReason]
    MISS_REASON_NO_STATE: _ClassVar[MissReason]
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_NEW: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_OTHER_SALT: MissReason
MISS_REASON_LAST_TOKEN: MissReason
MISS_REASON_PARTIAL_PAGE: MissReason
MISS_REASON_DISABLED: MissReason
MISS_REASON_OTHER_FORMAT: MissReason
MISS_REASON_NO_STATE: MissReason

class Prefix(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "request_id", "cache_salt")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _generation_pb2.TokenIds
    chat: _generation_pb2.Chat
    request_id: str
    cache_salt: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[_generation_pb2.Chat, _Mapping]] = ..., request_id: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("num_prefixes",)
    NUM_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    num_prefixes: int
    def __init__(self, num_prefixes: _Optional[int] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("pages", "page_size", "policy", "enabled", "query_tokens", "hit_tokens", "misses", "evicted_pages", "pinned_pages", "max_pinned_pages", "pins", "prefixes", "residual_pages")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _generation_pb2.PageCounts
    page_size: int
    policy: str
    enabled: bool
    query_tokens: int
    hit_tokens: int
    misses: _containers.RepeatedCompositeFieldContainer[MissTokens]
    evicted_pages: int
    pinned_pages: int
    max_pinned_pages: int
    pins: _containers.RepeatedCompositeFieldContainer[PinStats]
    prefixes: _containers.RepeatedCompositeFieldContainer[PrefixStats]
    residual_pages: _generation_pb2.PageCounts
    def __init__(self, pages: _Optional[_Union[_generation_pb2.PageCounts, _Mapping]] = ..., page_size: _Optional[int] = ..., policy: _Optional[str] = ..., enabled: _Optional[bool] = ..., query_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., misses: _Optional[_Iterable[_Union[MissTokens, _Mapping]]] = ..., evicted_pages: _Optional[int] = ..., pinned_pages: _Optional[int] = ..., max_pinned_pages: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[PinStats, _Mapping]]] = ..., prefixes: _Optional[_Iterable[_Union[PrefixStats, _Mapping]]] = ..., residual_pages: _Optional[_Union[_generation_pb2.PageCounts, _Mapping]] = ...) -> None: ...

class MissTokens(_message.Message):
    __slots__ = ("reason", "tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: MissReason
    tokens: int
    def __init__(self, reason: _Optional[_Union[MissReason, str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class PinStats(_message.Message):
    __slots__ = ("name", "num_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_tokens: int
    def __init__(self, name: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PrefixStats(_message.Message):
    __slots__ = ("parent", "start", "end", "num_hits", "tokens_saved", "text")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SAVED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    parent: int
    start: int
    end: int
    num_hits: int
    tokens_saved: int
    text: str
    def __init__(self, parent: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., num_hits: _Optional[int] = ..., tokens_saved: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "cached_tokens", "miss_position", "reason", "evicted_seconds_before", "misses", "text")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_POSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EVICTED_SECONDS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    miss_position: int
    reason: MissReason
    evicted_seconds_before: float
    misses: _containers.RepeatedCompositeFieldContainer[MissTokens]
    text: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., miss_position: _Optional[int] = ..., reason: _Optional[_Union[MissReason, str]] = ..., evicted_seconds_before: _Optional[float] = ..., misses: _Optional[_Iterable[_Union[MissTokens, _Mapping]]] = ..., text: _Optional[str] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("path", "prompt")
    PATH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    path: str
    prompt: Prefix
    def __init__(self, path: _Optional[str] = ..., prompt: _Optional[_Union[Prefix, _Mapping]] = ...) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("num_pages", "num_tokens", "num_bytes", "num_missing_pages")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSING_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    num_tokens: int
    num_bytes: int
    num_missing_pages: int
    def __init__(self, num_pages: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_missing_pages: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("num_pages", "num_tokens", "num_known_pages", "num_skipped_pages", "converted")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_PAGES_FIELD_NUMBER: _ClassVar[int]
    CONVERTED_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    num_tokens: int
    num_known_pages: int
    num_skipped_pages: int
    converted: str
    def __init__(self, num_pages: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_known_pages: _Optional[int] = ..., num_skipped_pages: _Optional[int] = ..., converted: _Optional[str] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("name", "prefix")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    name: str
    prefix: Prefix
    def __init__(self, name: _Optional[str] = ..., prefix: _Optional[_Union[Prefix, _Mapping]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("num_tokens", "prefix_tokens", "pinned_pages")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    prefix_tokens: int
    pinned_pages: int
    def __init__(self, num_tokens: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., pinned_pages: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("pinned_pages",)
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    pinned_pages: int
    def __init__(self, pinned_pages: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("num_pages",)
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    def __init__(self, num_pages: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("start_number", "log_id")
    START_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    start_number: int
    log_id: str
    def __init__(self, start_number: _Optional[int] = ..., log_id: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("number", "stored", "removed", "cleared", "log_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    stored: PagesStored
    removed: PagesRemoved
    cleared: CacheCleared
    log_id: str
    def __init__(self, number: _Optional[int] = ..., stored: _Optional[_Union[PagesStored, _Mapping]] = ..., removed: _Optional[_Union[PagesRemoved, _Mapping]] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ..., log_id: _Optional[str] = ...) -> None: ...

class PagesStored(_message.Message):
    __slots__ = ("digests", "parent")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    parent: bytes
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ..., parent: _Optional[bytes] = ...) -> None: ...

class PagesRemoved(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
