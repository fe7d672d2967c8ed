"""What pre-training learns: masks drawn on the device, the joint MLM and NSP loss.

In: batches of data/batches.py (or already masked ones of data/bert_records.py). Out: see trainer.Objective.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.config import Config
from bertjax.data.masking import MaskingSpec, mask_tokens, next_tokens
from bertjax.model.heads import BertForMaskedLM, BertForPreTraining, pretraining_network, shared_init
from bertjax.model.mesh import copies
from bertjax.model.presets import BertConfig, Execution
from bertjax.tokenization import Tokenizer
from bertjax.training import losses
from bertjax.training.trainer import Batch, Sums


@dataclasses.dataclass(frozen=True, eq=False)
class PretrainingObjective:
    """MLM + NSP as the trainer's Objective (trainer.py), for rows of one length.

    Loss: mean over the masked tokens of the global batch plus mean over its pairs (paper A.2).
    `masking` None: the rows arrive masked (TFRecords).
    """

    model: BertForPreTraining | BertForMaskedLM
    masking: MaskingSpec | None
    nsp: bool = True

    def init(self, key: jax.Array) -> dict[str, Any]:
        return shared_init(self.model, key)

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """Draws the masks of the global batch: adds mlm_positions, _labels, _weights [B, P]."""
        if self.masking is None:
            return batch
        if self.model.config.is_decoder:
            masked = next_tokens(batch["input_ids"], batch["attention_mask"])
        else:
            masked = mask_tokens(key, batch["input_ids"], batch["attention_mask"], self.masking)
        # Drawn once: XLA would draw a token's mask again for each of its hidden units, where words are looked up.
        masked = jax.lax.optimization_barrier(masked)
        return {
            **batch,
            "input_ids": masked.input_ids,
            "mlm_positions": masked.positions,
            "mlm_labels": masked.labels,
            "mlm_weights": masked.weights,
        }

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Masked tokens and pairs of the global batch."""
        return {"mlm": jnp.sum(batch["mlm_weights"]), "nsp": jnp.sum(batch["nsp_weights"])}

    def loss(
        self, params: Any, batch: Batch, denominators: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Sums]:
        pairs = {"cls_positions": batch.get("cls_positions")} if isinstance(self.model, BertForPreTraining) else {}
        outputs = self.model.apply(
            {"params": self._with_copies(params, len(batch["input_ids"]))},
            batch["input_ids"],
            batch["attention_mask"],
            batch["token_type_ids"],
            batch.get("position_ids"),
            batch["mlm_positions"],
            dropout_key=dropout_key,
            **pairs,
        )
        mlm_logits, nsp_logits = outputs if pairs else (outputs, None)
        loss, correct, count = losses.classification_sums(mlm_logits, batch["mlm_labels"], batch["mlm_weights"])
        total = losses.mean(loss, denominators["mlm"])
        sums = {"mlm_loss": (loss, count), "mlm_accuracy": (correct, count)}
        if self.nsp:
            loss, correct, count = losses.classification_sums(nsp_logits, batch["nsp_labels"], batch["nsp_weights"])
            total += losses.mean(loss, denominators["nsp"])
            sums |= {"nsp_loss": (loss, count), "nsp_accuracy": (correct, count)}
        return total, sums

    def _with_copies(self, params: Any, rows: int) -> Any:
        """`params` with a word table for each device's share of the rows (model/mesh.py)."""
        encoder = params["encoder"]
        embeddings = encoder["embeddings"]
        words = copies(embeddings["word_embeddings"], rows, self.model.execution.array_dtype)
        return {**params, "encoder": {**encoder, "embeddings": {**embeddings, "word_embeddings": words}}}


def make_objective(
    config: Config,
    model_config: BertConfig,
    execution: Execution,
    tokenizer: Tokenizer,
    length: int,
    pairs_per_row: int,
) -> PretrainingObjective:
    """What a phase with rows of `length` tokens trains."""
    return PretrainingObjective(
        pretraining_network(model_config, config.data.nsp)(model_config, execution),
        MaskingSpec.of(config, tokenizer, length, pairs_per_row),
        config.data.nsp,
    )
