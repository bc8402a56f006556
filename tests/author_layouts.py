"""Small checkpoints of Janus and Emu3 in their authors' layouts, from models that transformers builds."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import torch
from checkpoint_writers import randomise, write_text_tokenizer
from safetensors.torch import save_file

from underdraw.models import janus

DEEPSEEK_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.generation_embeddings\.", "gen_embed."),
    (r"^model\.generation_aligner\.fc1\.", "gen_aligner.layers.0."),
    (r"^model\.generation_aligner\.hidden_layers\.0\.", "gen_aligner.layers.2."),
    (r"^model\.generation_head\.proj_out\.", "gen_head.output_mlp_projector."),
    (r"^model\.generation_head\.vision_head\.", "gen_head.vision_head."),
    (r"^model\.vision_model\.", "vision_model.vision_tower."),
    (r"^model\.aligner\.", "aligner."),
    (r"^model\.vqmodel\.", "gen_vision_model."),
    (r"coder\.(?:down|up)\.(\d+)\.block\.", r"coder.conv_blocks.\1.res."),
    (r"coder\.(?:down|up)\.", "coder.conv_blocks."),
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
)  # from the names of transformers to DeepSeek's


def write_deepseek_janus(folder: Path, model: Any) -> None:
    """deepseek-ai/Janus-Pro-*: the weights of a model of transformers as one pickle, in the authors' layout."""
    folder.mkdir(parents=True)
    state = {}
    for name, tensor in model.state_dict().items():
        for pattern, new in DEEPSEEK_NAMES:
            name = re.sub(pattern, new, name)
        state[name] = tensor.clone()
    state["gen_vision_model.quantize.codebook_used"] = torch.zeros(64)
    torch.save(state, folder / "pytorch_model.bin")
    text = {**model.config.text_config.to_dict(), "bos_token_id": None, "pad_token_id": None}
    config = {
        "model_type": "multi_modality", "language_config": text,
        "vision_config": {"cls": "CLIPVisionTower", "params": {"image_size": 16}},
        "gen_vision_config": {"cls": "VQ-16", "params": {"image_token_size": 64, "n_embed": 8}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    specials = {janus.START: 1, janus.PAD: 2, janus.IMAGE_START: 4, "<|User|>": 6, "<|Assistant|>": 7}
    write_text_tokenizer(folder / "tokenizer.json", 20, specials)


BAAI_NAMES = (
    (r"^model\.text_model\.", "model."),
    (r"^model\.vqmodel\.", "images."),
    (r"\.down_block\.down\.", ".down."),
    (r"\.up_block\.up\.", ".up."),
    (r"\.middle_block\.attn_norm\.", ".mid.attn_1.norm."),
    (r"\.middle_block\.", ".mid."),
    (r"\.attn_norms\.(\d+)\.", r".attn.\1.norm."),
    (r"^(images.*)\.([qkv])_proj\.", r"\1.\2."),
    (r"\.out_proj\.", ".proj_out."),
)  # from the names of transformers to BAAI's
BAAI_FIRST_SPECIAL = 256  # after the single bytes


def baai_emu3_config() -> dict[str, Any]:
    """Ids as in BAAI's tokenizer, whose special tokens follow the text tokens, and 64 codes."""
    extra = BAAI_FIRST_SPECIAL + 3
    image = extra + 205
    return {
        "bos_token_id": extra + 203, "eos_token_id": extra + 204, "eol_token_id": extra + 200,
        "eof_token_id": extra + 201, "img_token_id": image, "boi_token_id": image + 1, "eoi_token_id": image + 2,
        "vocab_size": image + 3 + 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rope_theta": 1000000.0,
    }  # fmt: skip


def write_baai_emu3(folder: Path, companion: Path) -> Any:
    """BAAI/Emu3-Gen and BAAI/Emu3-VisionTokenizer; returns the same model as transformers builds it."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    config = baai_emu3_config()
    visual = ["<|image token|>", "<|image start|>", "<|image end|>", *(f"<|visual token {i:06d}|>" for i in range(64))]
    vocabulary = {name: config["img_token_id"] + index for index, name in enumerate(visual)}
    images = {"codebook_size": 64, "num_res_blocks": 2, "attn_resolutions": [3], "embed_dim": 4}
    model = Emu3ForConditionalGeneration(
        Emu3Config(
            text_config={
                **config,
                "pad_token_id": 0,
                "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            },
            vq_config={**images, "base_channels": 32, "channel_multiplier": [1, 1, 1, 2], "hidden_size": 64},
            vocabulary_map={**vocabulary, "<image>": 0},
        )
    ).eval()
    randomise(model, 8)
    state = {}
    for name, tensor in model.state_dict().items():
        for pattern, new in BAAI_NAMES:
            name = re.sub(pattern, new, name)
        state[name] = tensor.clone()
    parts = {"": {}, "images.": {}}  # type: dict[str, State]
    for name, tensor in state.items():
        prefix = "images." if name.startswith("images.") else ""
        is_attention = bool(re.search(r"attn.*\.(q|k|v|proj_out)\.weight$", name)) and prefix
        parts[prefix][name.removeprefix(prefix)] = tensor[:, :, None, None].clone() if is_attention else tensor
    for path, part, settings in (
        (folder, parts[""], {"model_type": "Emu3", "image_area": 32 * 32, **config}),
        (companion, parts["images."], {"model_type": "Emu3VisionVQ", "ch": 32, "ch_mult": [1, 1, 1, 2],
                                       "z_channels": 4, "double_z": False, **images}),
    ):  # fmt: skip
        path.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in part.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(settings))
    lines = [f"{base64.b64encode(bytes([value])).decode()} {value}" for value in range(BAAI_FIRST_SPECIAL)]
    (folder / "emu3.tiktoken").write_text("\n".join(lines))
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(visual) + "\n")
    return model
