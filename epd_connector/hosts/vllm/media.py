# SPDX-License-Identifier: Apache-2.0
"""What a request's media items bring with them: pixels, or only their metadata."""

import logging
from typing import TYPE_CHECKING

from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import ModelConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

logger = logging.getLogger(__name__)


class MediaFields:
    """Reads media items of one model. Used on the scheduler's thread."""

    def __init__(self, model_config: "ModelConfig") -> None:
        self._resolver = PlaceholderMetadataResolver(model_config)
        # Reading a model's fields builds its processor: now, not in the first request's step.
        for modality in MULTIMODAL_REGISTRY.create_processor(model_config).info.supported_mm_limits:
            self._resolver.fields_for(modality)

    def encodable(self, feature: "MultiModalFeatureSpec") -> bool:
        """Whether the host's own tower could encode the item: it has more than metadata."""
        if feature.data is None:
            return False
        described = self._resolver.fields_for(feature.modality)
        return any(name not in described for name in feature.data.get_data())

    def describe(self, features: "Sequence[MultiModalFeatureSpec]") -> dict[str, object]:
        """What a router needs to ask for the same prompt without pixels, by identifier."""
        return dict(collect_ec_item_metadata(list(features), self._resolver))
