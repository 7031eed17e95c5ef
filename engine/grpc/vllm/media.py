"""Images in requests of routers.

Hashes in the messages are ignored, because a client could send the hash of another image.
"""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from ...api.errors import InvalidRequest
from ...api.image import ImageTensors, Tensor
from ...api.prompt import ImagePrompt, Prompt

_IMAGES = (common_pb2.MODALITY_UNSPECIFIED, common_pb2.IMAGE)
_GRIDS = "image_grid_thw"


def with_images(request: pb.GenerateRequest, ids: Sequence[int]) -> Prompt:
    """Return the prompt of a request. Raises InvalidRequest for media that are not images."""
    if not request.HasField("mm_inputs"):
        if not request.HasField("media_refs"):
            return ids
        _check_modality("media_refs", *(item.modality for item in request.media_refs.items))
        return ImagePrompt(ids, urls=[item.url for item in request.media_refs.items])
    if request.HasField("media_refs"):
        raise InvalidRequest("a request must have mm_inputs or media_refs, got both; leave one of them out")
    inputs = request.mm_inputs
    _check_modality("mm_inputs", inputs.modality)
    if (key := inputs.encoder_input_key or "pixel_values") != "pixel_values":
        raise InvalidRequest(
            f"mm_inputs must have pixel_values, got {key!r:.60}; leave encoder_input_key out"
        )
    others = inputs.model_specific_tensors
    return ImagePrompt(
        ids,
        tensors=ImageTensors(
            _tensor("pixel_values", inputs.pixel_values),
            _tensor(_GRIDS, others[_GRIDS]) if _GRIDS in others else None,
            tuple((place.offset, place.length) for place in inputs.mm_placeholders),
        ),
    )


def _check_modality(field: str, *modalities: int) -> None:
    for modality in modalities:
        if modality not in _IMAGES:
            raise InvalidRequest(f"{field} must have images only, got modality {modality}; drop other media")


def _tensor(name: str, tensor: pb.TensorData) -> Tensor:
    if (kind := tensor.WhichOneof("payload")) != "inline":
        raise InvalidRequest(
            f"{name} must be in the message (inline), got {kind or 'none'}; start the router with "
            "--multimodal-tensor-transport inline"
        )
    return Tensor(tensor.inline, tuple(tensor.shape), tensor.dtype)
