"""An image encoder and a text decoder, compared by the contrastive loss of CLIP (arXiv 2103.00020, figure 3).

Shapes: B samples that are contrasted, b a rank's rows of these, T tokens, H hidden, E embedding.

| step   | image tower                                   | text tower                  | output            |
|--------|-----------------------------------------------|-----------------------------|-------------------|
| inputs | a class token and patches, with positions     | words, with positions       | [b, T, H]         |
| blocks | every token attends to all                    | causal                      | [b, T, H]         |
| vector | norm, linear and norm of the first token      | the same of the last token  | [b, E]            |
| meet   | the vectors of both towers, of a rank's rows  | the same                    | [2, b, E]         |
| loss   | each image's softmax over all B texts, and each text's over all B images: the mean of both | the same | |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import IGNORED, Batch, Chunk, Costs, Hidden, Scales
from meshwright.compute.models.attention import Block
from meshwright.compute.models.chain import Chain, blocks_of
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.kit import Kit
from meshwright.config import Config
from meshwright.families.vision.vit import patch_rows
from towers.kit import TOWERS, TowersKit
from towers.section import TwoTowers

INITIAL = Initial(0.1)
"""About one over the root of the hidden width, since these towers are narrow."""


class ImageInput(nn.Module):
    """Images [b, C, S, S], 0 to 255 -> [b, T, H]."""

    def __init__(self, model: TwoTowers, kit: Kit) -> None:
        super().__init__()
        self.patch, self.num_tokens = model.patch, model.positions
        self.patches = kit.linear("patches", patch_width(model), model.hidden, INITIAL)
        self.positions = kit.embedding(model.padded(model.positions), model.hidden, INITIAL)

    def forward(self, batch: Batch) -> Tensor:
        pixels = batch["images"].to(next(self.parameters()).dtype) / 127.5 - 1
        positions = torch.arange(self.num_tokens, device=pixels.device)
        embedded: Tensor = self.patches(patch_rows(pixels, self.patch)) + self.positions(positions)
        return embedded


class TextInput(nn.Module):
    """Words [b, T] -> [b, T, H]."""

    def __init__(self, model: TwoTowers, kit: Kit) -> None:
        super().__init__()
        self.words = kit.embedding(model.padded(model.vocabulary), model.hidden, INITIAL)
        self.positions = kit.embedding(model.padded(model.words), model.hidden, INITIAL)

    def forward(self, batch: Batch) -> Tensor:
        words = batch["words"]
        embedded: Tensor = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        return embedded


class Vector(nn.Module):
    """norm(linear(norm(h))) of the token number `token`: [b, T, H] -> [b, E]."""

    def __init__(self, model: TwoTowers, kit: Kit, token: int) -> None:
        super().__init__()
        self.token = token
        self.norm = kit.norm(model.hidden, model.norm_epsilon)
        self.linear = kit.linear("transform", model.hidden, model.embedding, INITIAL, bias=False)
        self.length = kit.norm(model.embedding, model.norm_epsilon, kind="rms")

    def forward(self, h: Tensor) -> Tensor:
        vector: Tensor = self.length(self.linear(self.norm(h[:, self.token].unsqueeze(1))))
        return vector.squeeze(1)


class TwoTowersModel(Chain):
    """Both towers, from images and captions to a loss. A rank computes the towers in `held`."""

    def __init__(self, model: TwoTowers, kit: Kit, chunk: Chunk | None = None) -> None:
        chunk = chunk or Chunk.whole(model.layers)
        super().__init__(chunk)
        self.kit = kit if isinstance(kit, TowersKit) else None
        self.held = TOWERS if self.kit is None else self.kit.held
        # The last norm gives vectors the length sqrt(E), so that E is the divisor of a cosine.
        self.divisor = model.embedding * model.temperature

        def pair(image: nn.Module, text: nn.Module) -> nn.ModuleDict:
            """Place a module of each tower on the tower's sub-grid."""
            modules = nn.ModuleDict({"image": image, "text": text})
            for tower, module in modules.items():
                if self.kit is not None:
                    self.kit.place(tower, module)
            return modules

        def block(layer: int) -> nn.ModuleDict:
            """Make both towers' block number `layer`."""
            image, text = (Block(model, kit, layer, INITIAL, causal=causal) for causal in (False, True))
            return pair(image, text)

        if chunk.first:
            self.inputs = pair(ImageInput(model, kit), TextInput(model, kit))
        self.blocks = blocks_of(chunk, block)
        if chunk.last:
            self.vectors = pair(Vector(model, kit, 0), Vector(model, kit, -1))

    def embed(self, batch: Batch) -> Hidden:
        """Embed the inputs of this rank's towers, [b, T, H] each."""
        return tuple(self.inputs[tower](batch) for tower in self.held)

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        assert isinstance(block, nn.ModuleDict), block
        return tuple(block[tower](h) for tower, h in zip(self.held, hidden, strict=True))

    def final_states(self, hidden: Hidden) -> Tensor:
        """Return the vectors of both towers for this rank's rows: [2, b, E]."""
        local = torch.stack([self.vectors[tower](h) for tower, h in zip(self.held, hidden, strict=True)])
        return local if self.kit is None else self.kit.meet(local)

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        """Return the scaled sum of losses over this rank's rows of images and of texts."""
        found = [
            F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), partner, reduction="sum",
                            ignore_index=IGNORED)
            for scores, partner in self.scores(h, batch)
        ]  # fmt: skip
        return scales["labels"] / 2 * (found[0] + found[1])

    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        """Count the images of this rank's rows with the highest score at the image's text."""
        scores, partner = next(iter(self.scores(h, batch)))
        return [(scores.argmax(1) == partner).sum()]

    def scores(self, h: Tensor, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Score images with all texts, then texts with all images.

        Args:
            h: The vectors of this rank's rows, [2, b, E].
            batch: `labels` [b, 1] is IGNORED for rows without a loss.

        Returns:
            For each tower the scores [b, B], and the column of each row's partner [b], or IGNORED.
        """
        everyone = h if self.kit is None else self.kit.all_rows(h)
        first = 0 if self.kit is None else self.kit.mesh.index("rows") * h.shape[1]
        partner = torch.arange(first, first + h.shape[1], device=h.device)
        partner = torch.where(batch["labels"][:, 0] == IGNORED, IGNORED, partner)
        return [(h[tower] @ everyone[1 - tower].mT / self.divisor, partner) for tower in (0, 1)]

    @staticmethod
    def products(config: Config) -> Costs:
        """Count multiplications of both towers, of one token for a vector. Scores depend on B, and are not counted."""
        model, words = config.model, config.data.lengths.source
        assert isinstance(model, TwoTowers), model
        hidden, lengths = model.hidden, (model.positions, words)
        layer = sum(tokens * (12 * hidden**2 + 2 * tokens * hidden) for tokens in lengths)
        begin = model.positions * patch_width(model) * hidden
        return Costs(begin, (layer,) * model.layers, 2 * model.embedding * hidden)

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        model = config.model
        assert isinstance(model, TwoTowers), model
        image = (model.channels, model.image, model.image)
        return {"images": image, "words": (config.data.lengths.source,), "labels": (1,)}

    @staticmethod
    def tokens_per_sample(config: Config) -> int:
        """Count the positions of an image and the words of a caption."""
        assert isinstance(config.model, TwoTowers), config.model
        return config.model.positions + config.data.lengths.source


def patch_width(model: TwoTowers) -> int:
    """Count the numbers of a patch: the pixels, and a one for the bias."""
    return model.channels * model.patch**2 + 1
