"""Pipeline: a model, a drafter, a tree policy and a verifier under the manners of diffusers.

`Pipeline.from_pretrained("tiny")("a red fox").images[0]`. The pipeline turns words into prompts, runs the one decoding
loop and turns codes into pictures. It knows no family by name.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from underdraw.drafters.block import BlockDrafter
from underdraw.drafters.eagle import Eagle
from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.engine.autotune import load_or_measure_costs, tree_within_budget
from underdraw.engine.cuda_graphs import Compile, make_graph_cache
from underdraw.engine.decode import TokenStatsMode, check_guidance, decode
from underdraw.errors import CapacityError, ConfigError, UnsupportedError, unknown
from underdraw.history import History, StepResult
from underdraw.models.checkpoint import HubOptions, is_hub_id, open_checkpoint
from underdraw.models.family import LoadedModel
from underdraw.models.loading import SAVED_CHOICES_FILE, load_model, read_saved_choices, resolve_placement
from underdraw.models.published_drafters import find_drafter_folder, load_nearest_codes, open_drafter
from underdraw.nn.row_invariant import pack_weights
from underdraw.output import PipelineOutput, Stats
from underdraw.policies.cost import Cost
from underdraw.policies.fixed import Chain
from underdraw.prompts import check_text
from underdraw.protocols import Drafter, TreePolicy, Verifier
from underdraw.registry import drafters, parse, policies, verifiers
from underdraw.request import GenerationRequest, Generator, Seed, seeds_of, texts_of
from underdraw.sampling import Sampler
from underdraw.tree import Proposal
from underdraw.verifiers.lantern import Lantern

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)
OutputType = Literal["pil", "np", "pt", "codes"]
Callback = Callable[["Pipeline", int, int, dict[str, Any]], Any]


class Pipeline:
    """Draws pictures. `tree` and `verifier` may be set at any time, by name and options or as objects."""

    def __init__(
        self, model: LoadedModel, *, drafter: str | Drafter = "auto", tree: str | TreePolicy = "auto",
        verifier: str | Verifier = "exact", proposal: str = "auto", compile: Compile = "auto",
    ) -> None:  # fmt: skip
        self.model, self.compile = model, compile
        self.graphs = make_graph_cache(self.device, compile)
        self.drafter_name = ""
        self._drafter_folder: Path | None = None  # where LANTERN's table may lie
        self.drafter: Drafter = self._make_drafter(drafter)
        self.tree = tree
        self.verifier = verifier
        self.proposal = proposal
        self._interrupted = False

    @classmethod
    def from_pretrained(
        cls, model: str | Path = "tiny", *, drafter: str | Drafter = "auto", tree: str | TreePolicy = "auto",
        verifier: str | Verifier = "auto", proposal: str = "auto", dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto", compile: Compile = "auto", revision: str | None = None,
        token: str | None = None, cache_dir: str | None = None, local_files_only: bool = False,
    ) -> Pipeline:  # fmt: skip
        """Load a checkpoint: "tiny", a folder or file, or an `owner/name` of the Hugging Face hub.

        "auto" is what the checkpoint was saved with, or else its own drafter, our tree and `exact`. `compile` says
        whether passes are compiled, captured and replayed ("on", "capture", "off"); "auto" does so on a GPU.
        """
        checkpoint = open_checkpoint(model, HubOptions(revision, token, cache_dir, local_files_only))
        own = {"drafter": "auto", "tree": "auto", "verifier": "exact", **read_saved_choices(checkpoint.path)}
        loaded = load_model(checkpoint, resolve_placement(device, dtype))
        elsewhere = checkpoint.folder / own["drafter"]  # a drafter that was saved along
        if own["drafter"] not in [path.name for path in loaded.drafter_folders] and elsewhere.is_dir():
            own["drafter"] = str(elsewhere)
        return cls(
            loaded,
            drafter=own["drafter"] if drafter == "auto" else drafter,
            tree=own["tree"] if tree == "auto" else tree,
            verifier=own["verifier"] if verifier == "auto" else verifier,
            proposal=proposal,
            compile=compile,
        )

    @property
    def tree(self) -> TreePolicy:
        return self._tree

    @tree.setter
    def tree(self, spec: str | TreePolicy) -> None:
        self.tree_name = spec if isinstance(spec, str) else policies.describe(spec)
        self._tree: TreePolicy = policies.build("adjacency" if spec == "auto" else spec)

    @property
    def verifier(self) -> Verifier:
        return self._verifier

    @verifier.setter
    def verifier(self, spec: str | Verifier) -> None:
        self.verifier_name = spec if isinstance(spec, str) else verifiers.describe(spec)
        made: Verifier = verifiers.build(spec)
        if isinstance(made, Lantern) and made.neighbours is None:
            near = load_nearest_codes(self.model.image_tokenizer.codebook, made.k, self._drafter_folder)
            made = dataclasses.replace(made, neighbours=near)
        self._verifier = made

    @property
    def proposal(self) -> str:
        """What is drafted: coupled, topk or sampled; auto is what the verifier likes best."""
        return self._proposal

    @proposal.setter
    def proposal(self, name: str) -> None:
        if name not in ("auto", *get_args(Proposal)):
            raise unknown("proposal", name, ("auto", *get_args(Proposal)))
        self._proposal = name

    @property
    def device(self) -> torch.device:
        return self.model.placement.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.placement.dtype

    def _make_drafter(self, spec: str | Drafter) -> Drafter:
        if not isinstance(spec, str):
            self.drafter_name = drafters.describe(spec)
            return spec
        self.drafter_name = spec
        if spec == "auto":
            if not self.model.drafter_folders:
                log.warning("%s has no drafter of its own; drafting with jacobi, which needs none.", self.model.name)
                self.drafter_name = "jacobi"
                return Jacobi()
            self.drafter_name = self.model.drafter_folders[0].name
            return self._open_drafter(self.model.drafter_folders[0])
        known = {path.name: path for path in self.model.drafter_folders}
        if spec in known:
            return self._open_drafter(known[spec])
        if parse(spec).name in drafters.names():
            return drafters.build(spec)
        if Path(spec).is_dir() or is_hub_id(spec):
            return self._open_drafter(spec)
        raise ConfigError(
            f"there is no drafter {spec!r}; use auto, one of {', '.join([*known, *drafters.names()])}, a folder or an "
            "owner/name of the Hugging Face hub."
        )

    def _open_drafter(self, name: str | Path) -> Drafter:
        self._drafter_folder = find_drafter_folder(name, self.model.hub)
        return open_drafter(self._drafter_folder, self.model.target)

    def __call__(
        self, prompt: str | Sequence[str], *, negative_prompt: str | None = None, height: int | None = None,
        width: int | None = None, guidance_scale: float | None = None, temperature: float | None = None,
        top_k: int | None = None, top_p: float | None = None, num_images_per_prompt: int = 1,
        seed: Seed = None, generator: Generator = None,
        output_type: OutputType = "pil", callback_on_step_end: Callback | None = None,
        token_stats: TokenStatsMode = "skip",
    ) -> PipelineOutput:  # fmt: skip
        """Draw pictures.

        Image i of a call has seed + i, unless `seed` or `generator` is a list with one entry per image. A generator
        stands for the seed it was made with. `callback_on_step_end(pipe, index, cell, {"step": ..., "history": ...})`
        is called for every image of every target pass; `pipe.interrupt()` inside it ends the call. `token_stats="keep"`
        records the entropy and top-1 chance of every cell for heat maps.
        """
        if output_type not in ("pil", "np", "pt", "codes"):
            raise ConfigError(f"output_type {output_type!r} is not known; use pil, np, pt or codes.")
        job = self.job(
            prompt, negative_prompt=negative_prompt, height=height, width=width, guidance_scale=guidance_scale,
            temperature=temperature, top_k=top_k, top_p=top_p, num_images_per_prompt=num_images_per_prompt,
            seed=seed, generator=generator,
        )  # fmt: skip
        histories = [History(self.model.make_layout(job.size)) for _ in job.prompts]
        self._interrupted = False
        steps = self.steps(job, histories, token_stats)
        began = time.perf_counter()
        try:
            for step in steps:
                if callback_on_step_end is not None:
                    known = {"step": step, "history": histories[step.sequence]}
                    callback_on_step_end(self, step.index, step.start, known)
                if self._interrupted:
                    break
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{len(job.prompts)} pictures at once do not fit into the memory of {self.device}; draw fewer together."
            ) from error
        seconds = time.perf_counter() - began
        return PipelineOutput(
            images=self.pictures(histories, output_type),
            prompts=job.prompts,
            seeds=job.seeds,
            stats=Stats.of(histories, seconds),
            histories=histories,
            complete=all(history.done for history in histories),
        )

    def plain(self) -> Pipeline:
        """The same model without speculation: one token a pass, the law and noise that `exact` reproduces."""
        return Pipeline(self.model, drafter="forced", tree="none", verifier="exact", compile=self.compile)

    def interrupt(self) -> None:
        """End the running call after this pass; what is not drawn yet stays blank."""
        self._interrupted = True

    def job(
        self, prompt: str | Sequence[str], *, negative_prompt: str | None = None, height: int | None = None,
        width: int | None = None, guidance_scale: float | None = None, temperature: float | None = None,
        top_k: int | None = None, top_p: float | None = None, num_images_per_prompt: int = 1,
        seed: Seed = None, generator: Generator = None,
    ) -> GenerationRequest:  # fmt: skip
        """Check a call's arguments and fill in what the family says."""
        own, prompts = self.model.defaults, texts_of(prompt, num_images_per_prompt)
        job = GenerationRequest(
            prompts=prompts,
            negative=negative_prompt,
            seeds=seeds_of(seed, generator, len(prompts)),
            size=self.model.resolve_size(height, width),
            guidance=own.guidance if guidance_scale is None else guidance_scale,
            temperature=own.temperature if temperature is None else temperature,
            top_k=own.top_k if top_k is None else top_k,
            top_p=own.top_p if top_p is None else top_p,
        )
        if negative_prompt is not None:
            check_text(negative_prompt)
        check_guidance(job.guidance)
        self.sampler(job)  # for its checks, before anything is drawn
        return job

    def settings(self, job: GenerationRequest) -> dict[str, Any]:
        """Everything besides prompt, seed and model that a picture depends on, and what drafted it: for records."""
        return {
            "guidance": job.guidance, "temperature": job.temperature, "top_k": job.top_k, "top_p": job.top_p,
            "height": job.size.height, "width": job.size.width, "negative_prompt": job.negative,
            "tree": self.tree_name, "verifier": self.verifier_name, "drafter": self.drafter_name,
            "proposal": self.proposal,
            "dtype": str(self.dtype).removeprefix("torch."),
        }  # fmt: skip

    def sampler(self, job: GenerationRequest) -> Sampler:
        """Noise, temperature and filters of a job."""
        return Sampler(
            self.model.make_layout(job.size), job.seeds, temperature=job.temperature, top_k=job.top_k, top_p=job.top_p,
            device=self.device,
        )  # fmt: skip

    def steps(
        self, job: GenerationRequest, histories: list[History], token_stats: TokenStatsMode = "skip"
    ) -> Iterator[StepResult]:
        """The decoding loop of a job, one Step after the other; tokens land in `histories`."""
        return self.decode(job, histories, Forced() if self.tree_name == "none" else self.drafter, token_stats)

    def decode(
        self, job: GenerationRequest, histories: list[History], drafter: Drafter, token_stats: TokenStatsMode = "skip"
    ) -> Iterator[StepResult]:
        """`steps` with another drafter in the place of the pipeline's own, for example one that keeps time."""
        prompts = [self.model.make_prompt(text, job.negative, job.size) for text in job.prompts]
        proposal = None if self.proposal == "auto" else cast(Proposal, self.proposal)
        return decode(
            self.model.target, drafter, self.policy(job), self.verifier, prompts, self.sampler(job),
            guidance=job.guidance, proposal=proposal, histories=histories, token_stats=token_stats, graphs=self.graphs,
        )  # fmt: skip

    def policy(self, job: GenerationRequest) -> TreePolicy:
        """The policy of a call. "auto" follows what passes cost here, measured once for a model and a batch size."""
        if self.tree_name != "auto":
            return self.tree
        if not isinstance(self.drafter, Eagle | BlockDrafter):
            return Chain(24)  # guesses that are all there at once want no tree
        batch = min(len(job.prompts), 4)
        arch = self.model.target.net.arch
        key = (self.model.family, arch.dim, arch.layers, self.drafter_name, self.dtype, f"batch {batch}")
        prompts = [self.model.make_prompt(job.prompts[0], job.negative, job.size)] * batch
        sampler = Sampler(
            self.model.make_layout(job.size), range(batch), temperature=job.temperature, device=self.device
        )
        costs = load_or_measure_costs(key, self.model.target, self.drafter, prompts, sampler, job.guidance, self.graphs)
        log.debug("passes cost %s", costs)
        return (
            tree_within_budget(costs)
            if self.graphs is not None
            else Cost(costs.plain, costs.base, costs.node, costs.level)
        )

    @torch.inference_mode()
    def pictures(self, histories: Sequence[History], output_type: OutputType = "pil") -> Any:
        """Pictures of what was drawn; cells without a token are white."""
        layout = histories[0].layout
        tokens = torch.from_numpy(np.stack([history.tokens for history in histories]))
        missing = torch.from_numpy(np.stack([history.grid("tokens") < 0 for history in histories]))
        codes = layout.grid(torch.where(tokens < 0, layout.codes.start, tokens))
        if output_type == "codes":
            return codes
        # One by one: convolutions round by batch size, and a picture must not depend on its neighbours.
        pixels = torch.cat([self._decode(one) for one in codes.split(1)])  # (B, 3, H, W) in [0, 1]
        if missing.any():
            blank = missing[:, None].repeat_interleave(self.model.image_tokenizer.downsample, 2)
            blank = blank.repeat_interleave(self.model.image_tokenizer.downsample, 3)
            pixels = pixels.masked_fill(blank, 1.0)
        if output_type == "pt":
            return pixels
        array = pixels.permute(0, 2, 3, 1).numpy()
        return array if output_type == "np" else [_to_pil(picture) for picture in array]

    def _decode(self, codes: Tensor) -> Tensor:
        """Codes (B, rows, cols) to pixels (B, 3, H, W) in [0, 1] on the CPU."""
        return (self.model.image_tokenizer.decode(codes.to(self.device)).float().cpu() * 0.5 + 0.5).clamp(0, 1)

    def to(self, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None) -> Pipeline:
        """Move the model and its drafter; returns the pipeline."""
        place = resolve_placement(self.device if device is None else device, self.dtype if dtype is None else dtype)
        modules = [self.model.target.net, self.model.target.projection, getattr(self.drafter, "net", None)]
        for module in modules:
            if isinstance(module, torch.nn.Module):
                module.to(place.device, place.dtype)
                pack_weights(module)
        if isinstance(self.model.image_tokenizer, torch.nn.Module):
            self.model.image_tokenizer.to(place.device)
        self.graphs = make_graph_cache(self.device, self.compile)
        if isinstance(self.verifier, Lantern):  # its table of neighbours moves too
            self.verifier = self.verifier.bind(self.model.image_tokenizer.codebook)
        return self

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the checkpoint's files and this pipeline's choice of drafter, tree and verifier into a folder."""
        folder = Path(folder)
        source = self.model.path
        if source is None:
            raise UnsupportedError(f"{self.model.name} was not loaded from files; there is nothing to copy.")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is not an empty folder; give a new one.")
        choice = self._choice()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            made = Path(temporary) / "model"
            if source.is_dir():
                shutil.copytree(source, made)
            else:
                made.mkdir()
                shutil.copy(source, made)
            if Path(self.drafter_name).is_dir():  # a drafter from elsewhere comes along
                choice["drafter"] = f"drafter-{Path(self.drafter_name).resolve().name}"
                shutil.copytree(self.drafter_name, made / choice["drafter"])
            (made / SAVED_CHOICES_FILE).write_text(json.dumps(choice, indent=2) + "\n", encoding="utf-8")
            if folder.exists():
                folder.rmdir()
            made.replace(folder)
        return folder

    def _choice(self) -> dict[str, str]:
        """Drafter, tree and verifier by names that `from_pretrained` understands."""
        if self.tree_name != "auto":
            policies.build(self.tree_name)
        verifiers.build(self.verifier_name)
        known = [path.name for path in self.model.drafter_folders]
        if self.drafter_name not in known and not Path(self.drafter_name).is_dir() and not is_hub_id(self.drafter_name):
            drafters.build(self.drafter_name)
        return {"drafter": self.drafter_name, "tree": self.tree_name, "verifier": self.verifier_name}

    def push_to_hub(self, name: str, *, token: str | None = None, private: bool = False) -> str:
        """Upload what `save_pretrained` writes to the Hugging Face hub; returns the address."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as temporary:
            folder = self.save_pretrained(Path(temporary) / "model")
            try:
                api.create_repo(name, private=private, exist_ok=True)
                return str(api.upload_folder(repo_id=name, folder_path=str(folder)))
            except (HfHubHTTPError, HFValidationError, OSError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise UnsupportedError(
                    f"{name} could not be uploaded to the Hugging Face hub ({reason}); check the name and your token."
                ) from error


def _to_pil(picture: np.ndarray[Any, Any]) -> Image:
    import PIL.Image

    return PIL.Image.fromarray((picture * 255).round().astype(np.uint8))
