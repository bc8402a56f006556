"""Pipeline: a model, a drafter, a tree policy and a verifier behind the interface of diffusers.

`Pipeline.from_pretrained("tiny")("a red fox").images[0]`. The pipeline validates a call, tokenizes its prompts, runs
the decoding loop and decodes the codes to pixels. Nothing here depends on a model family.
"""

from __future__ import annotations

import functools
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch

from underdraw.advice import AdvisedAttributes, check_call_options, check_loading_options
from underdraw.drafters.forced import Forced
from underdraw.engine.cuda_graphs import Compile
from underdraw.engine.decode import TokenStatsMode, decode, resolve_proposal
from underdraw.engine.scheduler import Scheduler
from underdraw.engine.slot_batch import BatchParts
from underdraw.errors import CapacityError, ConfigError
from underdraw.history import History, StepResult
from underdraw.models.hub import HubOptions
from underdraw.models.loading import CheckModel, load_model, open_for_loading, read_saved_choices, resolve_placement
from underdraw.models.saving import save_checkpoint, upload_folder, write_model_card
from underdraw.nn.numerics import Numerics
from underdraw.nn.quantized_weight import WeightFormat
from underdraw.output import OutputType, PipelineOutput, Stats, check_output_type, decode_images
from underdraw.parts import PipelineParts, check_call_drafter, check_parts, check_runtime, check_token_stats
from underdraw.policies.fixed import NoTree
from underdraw.protocols import Drafter, Prompt, TreePolicy, Verifier
from underdraw.ranges import check_integer
from underdraw.request import (
    GenerationRequest,
    Generator,
    RequestOptions,
    Seed,
    check_request,
    expand_negative_prompts,
    expand_prompts,
    resolve_seeds,
)
from underdraw.sampling import Sampler
from underdraw.tree import Proposal

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Never, Unpack

log = logging.getLogger(__name__)
Callback = Callable[["Pipeline", int, int, dict[str, Any]], Any]


class CallOptions(RequestOptions, total=False):
    """Keyword arguments of a call that do not change its type."""

    callback_on_step_end: Callback | None
    token_stats: TokenStatsMode


class Pipeline(PipelineParts, AdvisedAttributes):
    """Text to images. `drafter`, `tree`, `verifier` and `proposal` may be set at any time, by name or as objects."""

    max_batch = 16  # images that a call draws at once

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "tiny",
        *,
        drafter: str | Drafter = "auto",
        tree: str | TreePolicy = "auto",
        verifier: str | Verifier = "auto",
        proposal: str = "auto",
        dtype: str | torch.dtype = "auto",
        torch_dtype: str | torch.dtype | None = None,
        device: str | torch.device = "auto",
        compile: Compile = "auto",
        numerics: Numerics = "row-invariant",
        weights: Literal["auto"] | WeightFormat = "auto",
        check: CheckModel | None = None,
        **hub_options: Any,
    ) -> Pipeline:
        """Load a checkpoint: "tiny", a folder or file, or an `owner/name` of the Hugging Face hub.

        "auto" is what the checkpoint was saved with, or else its first drafter (`jacobi-tree` if it has none), the
        `auto` tree and `exact`. `torch_dtype` is another name of `dtype`. `compile` says how passes run on a GPU:
        captured as CUDA graphs and replayed ("capture"), with "fastest" numerics compiled before that ("on"), or
        eagerly ("off"); "auto" is "on". `numerics` is "row-invariant" (the same seed gives the same image with every
        tree and batch) or "fastest". `weights` quantises the matrices of the decoder while they are read: "int8", "fp8"
        or "int4"; "auto" is what the checkpoint was saved with, else "full". `check` may refuse a model before its
        weights are downloaded or read. The hub options are `revision`, `token`, `cache_dir` and `local_files_only`.
        """
        placement = resolve_placement(device, dtype)
        if torch_dtype is not None:
            if dtype != "auto" and resolve_placement(device, torch_dtype) != placement:
                raise ConfigError(f"dtype {dtype} and torch_dtype {torch_dtype} differ; pass one of them.")
            placement = resolve_placement(device, torch_dtype)
        check_loading_options(cls.from_pretrained, hub_options, drafter, tree)
        check_parts(drafter=drafter, tree=tree, verifier=verifier, proposal=proposal)
        check_runtime(placement.device, compile, numerics, weights)
        if placement.dtype == torch.float16 and placement.device.type == "cpu":
            log.warning("float16 is many times slower than float32 on a CPU; leave the dtype out, or use bfloat16.")
        checkpoint, placement = open_for_loading(model, HubOptions(**hub_options), placement, weights, drafter, check)
        loaded = load_model(checkpoint, placement)
        saved = read_saved_choices(checkpoint, loaded)
        return cls(
            loaded,
            drafter=saved["drafter"] if drafter == "auto" else drafter,
            tree=saved["tree"] if tree == "auto" else tree,
            verifier=saved["verifier"] if verifier == "auto" else verifier,
            proposal=proposal,
            compile=compile,
            numerics=numerics,
        )

    @overload
    def __call__(
        self, prompt: str | Sequence[str], *, output_type: Literal["pil"] = "pil", **options: Unpack[CallOptions]
    ) -> PipelineOutput[list[Image]]: ...

    @overload
    def __call__(
        self, prompt: str | Sequence[str], *, output_type: OutputType, **options: Unpack[CallOptions]
    ) -> PipelineOutput[Any]: ...

    @overload
    def __call__(
        self, prompt: str | Sequence[str], *, return_dict: Literal[False], **options: Unpack[CallOptions]
    ) -> tuple[Any]: ...

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        output_type: OutputType = "pil",
        callback_on_step_end: Callback | None = None,
        token_stats: TokenStatsMode = "skip",
        return_dict: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Draw images: `generate(request(prompt, **options))`; with `return_dict=False` the tuple `(images,)`.

        The options are those of `request`: negative_prompt, height, width, guidance_scale, temperature, top_k, top_p,
        num_images_per_prompt, seed and generator.
        """
        check_call_options(options, [*CallOptions.__annotations__, "output_type", "return_dict"])
        out = self.generate(
            self.request(prompt, **options),
            output_type=output_type,
            callback_on_step_end=callback_on_step_end,
            token_stats=token_stats,
        )
        return out if return_dict else out.to_tuple()

    def request(
        self,
        prompt: str | Sequence[str],
        *,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        num_images_per_prompt: int = 1,
        seed: Seed = None,
        generator: Generator = None,
        **unknown: Never,
    ) -> GenerationRequest:
        """Validate the arguments of a call and fill in the model's defaults.

        Image i has the seed `seed + i`, unless `seed` or `generator` is a list with one entry per image. A generator
        stands for its initial seed.
        """
        check_call_options(unknown, RequestOptions.__annotations__, "request")
        defaults, prompts = self.model.defaults, expand_prompts(prompt, num_images_per_prompt)
        for name, side in (("height", height), ("width", width)):
            if side is not None:
                check_integer(name, side)
        self.model.warn_unknown_words(prompts)
        return GenerationRequest(
            prompts=prompts,
            negative_prompts=expand_negative_prompts(negative_prompt, len(prompts), num_images_per_prompt),
            seeds=resolve_seeds(seed, generator, len(prompts)),
            size=self.model.resolve_size(height, width),
            guidance=defaults.guidance if guidance_scale is None else guidance_scale,
            temperature=defaults.temperature if temperature is None else temperature,
            top_k=defaults.top_k if top_k is None else top_k,
            top_p=defaults.top_p if top_p is None else top_p,
        )

    def generate(
        self,
        request: GenerationRequest,
        *,
        output_type: OutputType = "pil",
        callback_on_step_end: Callback | None = None,
        token_stats: TokenStatsMode = "skip",
        drafter: Drafter | None = None,
    ) -> PipelineOutput[Any]:
        """Draw the images of a request.

        `callback_on_step_end(pipe, pass_index, step, {"step": StepResult, "history": History})` is called for every
        image of every target pass; `pipe.interrupt()` inside it ends the call. `token_stats="keep"` records entropy
        and top-1 probability of every cell for heat maps. `drafter` replaces the pipeline's for this call.
        """
        check_request(request)
        if callback_on_step_end is not None and not callable(callback_on_step_end):
            raise ConfigError(f"callback_on_step_end {callback_on_step_end!r} cannot be called; pass a function.")
        thread = threading.get_ident()
        check_output_type(self.model.image_tokenizer, output_type)
        layout = self.model.make_layout(request.size)
        histories = [History(layout, prompt=prompt) for prompt in request.prompts]
        self._interrupted.discard(thread)
        try:
            steps = self.stream(request, histories, token_stats, drafter)
            started = time.perf_counter()
            with self._progress(histories) as bar:
                for step in steps:
                    bar.update(len(step.tokens))
                    if callback_on_step_end is not None:
                        details = {"step": step, "history": histories[step.sequence]}
                        callback_on_step_end(self, step.index, step.start, details)
                    if thread in self._interrupted:
                        break
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{len(histories)} images at once do not fit into the memory of {self.device}; draw fewer together."
            ) from error
        seconds = time.perf_counter() - started
        return PipelineOutput(
            images=self.decode_images(histories, output_type),
            prompts=request.prompts,
            seeds=request.seeds,
            stats=Stats.of(histories, seconds),
            histories=histories,
            complete=all(history.done for history in histories),
            model=self.model.name,
            settings=self.settings(request),
        )

    def stream(
        self,
        request: GenerationRequest,
        histories: list[History],
        token_stats: TokenStatsMode = "skip",
        drafter: Drafter | None = None,
    ) -> Iterator[StepResult]:
        """The decoding loop of a request, one result per image and pass; tokens are recorded in `histories`.

        More than `max_batch` images take turns: one that is finished makes room for the next.
        """
        check_request(request)
        check_token_stats(token_stats)
        check_call_drafter(drafter)
        if len(request.prompts) > self.max_batch and drafter is None:
            return self._stream_in_slots(request, histories, token_stats)
        policy = self._resolved_tree = self._resolve_tree(request)
        if drafter is None:
            drafter = Forced() if isinstance(policy, NoTree) else self.drafter
        return decode(
            self.model.target,
            drafter,
            policy,
            self.verifier,
            self.prompts(request),
            self.sampler(request),
            guidance=request.guidance,
            proposal=self._chosen_proposal,
            histories=histories,
            token_stats=token_stats,
            graphs=self.graphs,
        )

    def _stream_in_slots(
        self, request: GenerationRequest, histories: list[History], token_stats: TokenStatsMode
    ) -> Iterator[StepResult]:
        scheduler = self.scheduler(slots=self.max_batch, token_stats=token_stats)
        scheduler.add(request, histories=histories)
        self._resolved_tree = self.tree_for_batch(scheduler.slots)
        try:
            while scheduler.has_work:
                step = scheduler.step()
                for image in step.finished:
                    if image.error is not None:
                        raise image.error
                for _, result in step.results:
                    yield result
        finally:
            scheduler.close()

    def scheduler(self, *, slots: int = 8, token_stats: TokenStatsMode = "skip") -> Scheduler:
        """A scheduler that draws the images of many requests together, at most `slots` at once."""
        return Scheduler(self, slots=slots, token_stats=token_stats)

    def batch_parts(self, token_stats: TokenStatsMode = "skip") -> BatchParts:
        """What a scheduler draws with."""
        check_token_stats(token_stats)
        return BatchParts(
            self.model.target,
            Forced() if isinstance(self._tree, NoTree) else self.drafter,
            self.verifier,
            resolve_proposal(self.verifier, self._chosen_proposal),
            token_stats,
            self.graphs,
            functools.cache(self.tree_for_batch),  # may measure costs
        )

    @property
    def _chosen_proposal(self) -> Proposal | None:
        return None if self.proposal == "auto" else cast(Proposal, self.proposal)

    def interrupt(self) -> None:
        """End this thread's running call after this pass; cells without a token are grey."""
        self._interrupted.add(threading.get_ident())

    def plain(self) -> Pipeline:
        """The same model without speculation: one token per pass, the tokens that `exact` reproduces."""
        parts = {"drafter": "forced", "tree": "none", "verifier": "exact"}
        pipe = Pipeline(self.model, **parts, compile=self.compile, numerics=self.model.target.numerics)
        pipe.graphs, pipe.max_batch = self.graphs, self.max_batch  # what is captured stays captured
        pipe.set_progress_bar_config(**self._progress_bar)
        return pipe

    def prompts(self, request: GenerationRequest) -> list[Prompt]:
        """The tokenized prompts of a request."""
        pairs = zip(request.prompts, request.negative_prompts, strict=True)
        with self._library_bars():
            return [self.model.make_prompt(text, negative, request.size) for text, negative in pairs]

    def sampler(self, request: GenerationRequest) -> Sampler:
        """Noise, temperature and filters of a request."""
        return Sampler(
            self.model.make_layout(request.size),
            request.seeds,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            device=self.device,
        )

    def settings(self, request: GenerationRequest) -> dict[str, Any]:
        """Everything besides prompt, seed and model that an image depends on, and what drafted it: for records."""
        return {
            **request.settings(),
            "tree": self.tree_name,
            "verifier": self.verifier_name,
            "drafter": self.drafter_name,
            "proposal": self.proposal,
            "dtype": str(self.dtype).removeprefix("torch."),
            "numerics": self.numerics,
            "weights": self.weights,
        }

    def sample_request(self, images: int) -> GenerationRequest:
        size = self.model.sizes[0]  # also of models without a default size
        return self.request("red fox", height=size.height, width=size.width, num_images_per_prompt=images, seed=0)

    def _progress(self, histories: Sequence[History]) -> Any:
        """A progress bar over the tokens of a call; the first token of each image comes with the prefill."""
        from tqdm import tqdm

        layout = histories[0].layout
        total = (layout.stop - layout.start - 1) * len(histories)
        options = {"disable": not sys.stderr.isatty(), "unit": "tok", "leave": False, **self._progress_bar}
        return tqdm(total=total, **options)

    def decode_images(self, histories: Sequence[History], output_type: OutputType = "pil") -> Any:
        """Images of the recorded tokens; cells without a token are grey."""
        with self._library_bars():
            return decode_images(self.model.image_tokenizer, histories, self.device, output_type)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the checkpoint's files and the names of drafter, tree and verifier into a new folder."""
        choices, drafter_folder = self._choices()
        with self._library_bars():
            return save_checkpoint(self.model, choices, folder, drafter_folder)

    def push_to_hub(self, name: str, *, token: str | None = None, private: bool = False) -> str:
        """Upload what `save_pretrained` writes and a model card to the Hugging Face hub; returns the address."""
        with tempfile.TemporaryDirectory() as temporary, self._library_bars():
            folder = self.save_pretrained(Path(temporary) / "model")
            write_model_card(self.model, folder, name)
            return upload_folder(folder, name, token=token, private=private)
