"""The parts of a pipeline: drafter, tree policy, verifier and proposal, assigned by name or as objects."""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from underdraw.advice import check_options
from underdraw.engine import autotune
from underdraw.engine.cuda_graphs import Compile, make_graph_cache
from underdraw.engine.step import TokenStatsMode
from underdraw.errors import CapacityError, ConfigError, unknown
from underdraw.models.family import LoadedModel
from underdraw.models.lantern_drafters import load_nearest_codes
from underdraw.models.loading import check_drafter, load_drafter_by_name, resolve_placement
from underdraw.models.progress_bars import hidden_progress_bars
from underdraw.models.saving import save_drafter_repository, upload_folder
from underdraw.nn.linear import pack_weights
from underdraw.nn.numerics import Numerics, resolve_numerics
from underdraw.nn.quantized_weight import WeightFormat, is_quantized
from underdraw.protocols import Drafter, TreePolicy, Verifier
from underdraw.registry import drafters, policies, verifiers
from underdraw.request import GenerationRequest
from underdraw.sampling import Sampler
from underdraw.tree import Proposal
from underdraw.verifiers.lantern import Lantern

if TYPE_CHECKING:
    from typing_extensions import Self


class PipelineParts:
    """A model and what decodes with it. An assignment that fails changes nothing."""

    _progress_bar: Mapping[str, Any] = MappingProxyType({})  # options of tqdm

    def __init__(
        self,
        model: LoadedModel,
        *,
        drafter: str | Drafter = "auto",
        tree: str | TreePolicy = "auto",
        verifier: str | Verifier = "exact",
        proposal: str = "auto",
        compile: Compile = "auto",
        numerics: Numerics = "row-invariant",
    ) -> None:
        if not isinstance(model, LoadedModel):
            name = repr(str(model)) if isinstance(model, str | Path) else "MODEL"
            raise ConfigError(
                f"a pipeline is made of a loaded model, not {type(model).__name__}; "
                f"use {type(self).__name__}.from_pretrained({name})."
            )
        _check_numerics(numerics, model.placement.weights)
        self.model = dataclasses.replace(model, target=dataclasses.replace(model.target, numerics=numerics))
        self.compile = compile
        self.graphs = make_graph_cache(self.device, compile, numerics)
        self._drafter = load_drafter_by_name(drafter, model)
        self._interrupted: set[int] = set()  # threads whose call is to end
        self._resolved_tree: TreePolicy | None = None
        self.tree = tree
        self._verifier_spec: str | Verifier = verifier
        self.verifier = verifier
        self.proposal = proposal

    @property
    def drafter(self) -> Drafter:
        return self._drafter.drafter

    @drafter.setter
    def drafter(self, spec: str | Drafter) -> None:
        with self._library_bars():
            drafter = load_drafter_by_name(spec, self.model)
        verifier = self._build_verifier(self._verifier_spec, drafter.source)  # its table may come with the drafter
        self._drafter, self._verifier, self._resolved_tree = drafter, verifier, self._tree

    @property
    def drafter_name(self) -> str:
        return self._drafter.name

    @property
    def tree(self) -> TreePolicy:
        """The tree policy. Under `auto`, that of the latest call, or before it the one of a call for one image."""
        if self._resolved_tree is None:
            self._resolved_tree = self._resolve_tree()
        return self._resolved_tree

    @tree.setter
    def tree(self, spec: str | TreePolicy) -> None:
        _check_part("tree", spec, "plan")
        name = spec if isinstance(spec, str) else policies.describe(spec)
        self._tree = autotune.build_tree(spec)  # None is auto; raises before anything has changed
        self._resolved_tree, self.tree_name = self._tree, name

    @property
    def verifier(self) -> Verifier:
        return self._verifier

    @verifier.setter
    def verifier(self, spec: str | Verifier) -> None:
        _check_part("verifier", spec, "verify")
        name = spec if isinstance(spec, str) else verifiers.describe(spec)
        self._verifier = self._build_verifier(spec, self._drafter.source)  # raises before anything has changed
        self._verifier_spec, self.verifier_name = spec, name

    def _build_verifier(self, spec: str | Verifier, drafter_source: Path | str | None) -> Verifier:
        verifier: Verifier = verifiers.build(spec)
        if isinstance(verifier, Lantern) and verifier.neighbours is None:
            with self._library_bars():
                neighbours = load_nearest_codes(
                    self.model.image_tokenizer.codebook, verifier.neighbours_needed, drafter_source, self.model.hub
                )
            return dataclasses.replace(verifier, neighbours=neighbours)
        return verifier

    @property
    def proposal(self) -> str:
        """How tokens are drafted: coupled, topk or sampled; auto is the verifier's preferred one."""
        return self._proposal

    @proposal.setter
    def proposal(self, name: str) -> None:
        _check_proposal(name)
        self._proposal = name

    @property
    def device(self) -> torch.device:
        return self.model.placement.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.placement.dtype

    @property
    def numerics(self) -> Numerics:
        """`row-invariant` where the same seed gives the same image in every tree and batch; else `fastest`."""
        return resolve_numerics(self.model.target.numerics, self.device)

    @property
    def weights(self) -> WeightFormat:
        """The format of the decoder's matrices: `full`, or `int8`, `fp8` or `int4` if they are quantised."""
        return self.model.placement.weights

    def set_progress_bar_config(self, **options: Any) -> None:
        """Options of tqdm for the progress bar; by default it is shown on a terminal only.

        `disable=True` also hides the bars of libraries that download or load parts later.
        """
        from tqdm.std import tqdm

        allowed = inspect.signature(tqdm.__init__).parameters.keys() - {"self", "kwargs", "iterable", "total"}
        check_options("the progress bar", options, allowed, {})
        self._progress_bar = options

    def _library_bars(self) -> AbstractContextManager[None]:
        """Bars of libraries are shown inside, unless this pipeline's is disabled."""
        return hidden_progress_bars(bool(self._progress_bar.get("disable")))

    @property
    def components(self) -> dict[str, nn.Module]:
        """The modules that hold weights."""
        target = self.model.target
        parts = {
            "target": target.net,
            "projection": target.projection,
            "image_tokenizer": self.model.image_tokenizer,
            "drafter": getattr(self.drafter, "net", None),
        }
        return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}

    def __repr__(self) -> str:
        parts = {
            "model": self.model.name,
            "family": self.model.family,
            "drafter": self.drafter_name,
            "tree": self.tree_name,
            "verifier": self.verifier_name,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            **({} if self.weights == "full" else {"weights": self.weights}),
        }
        return f"Pipeline({', '.join(f'{key}={value!r}' for key, value in parts.items())})"

    def to(
        self, device: str | torch.device | torch.dtype | None = None, dtype: str | torch.dtype | None = None
    ) -> Self:
        """Move model and drafter: `to("cuda")`, `to(torch.bfloat16)` or `to("cuda", torch.bfloat16)`."""
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise ConfigError(f"two dtypes were passed, {device} and {dtype}; pass a device and a dtype.")
            device, dtype = None, device
        placement = resolve_placement(self.device if device is None else device, self.dtype if dtype is None else dtype)
        graphs = make_graph_cache(placement.device, self.compile, self.model.target.numerics)
        for name, module in self.components.items():
            if name == "image_tokenizer":
                module.to(placement.device)  # stays float32
            else:
                module.to(placement.device, placement.dtype)
                pack_weights(module)
        self.graphs, self._resolved_tree = graphs, self._tree  # costs differ between devices
        if isinstance(self._verifier, Lantern) and self._verifier.neighbours is not None:
            neighbours = self._verifier.neighbours.to(placement.device)
            self._verifier = dataclasses.replace(self._verifier, neighbours=neighbours)
        return self

    def sample_request(self, images: int) -> GenerationRequest:
        """A request for measuring costs; its prompt is also a class of ImageNet, for models that draw classes."""
        raise NotImplementedError

    def _resolve_tree(self, request: GenerationRequest | None = None) -> TreePolicy:
        """The tree policy of a request; without one, of a request for one image."""
        request = request or self.sample_request(1)
        images = len(request.prompts)
        batches = autotune.measured_batches(images, self.drafter, is_captured=self.graphs is not None)
        for batch in batches[:-1]:
            with suppress(CapacityError, torch.OutOfMemoryError):  # then a smaller batch is measured
                return autotune.resolve_tree(self._tree, self.drafter, partial(self._workload, request, batch), images)
        return autotune.resolve_tree(self._tree, self.drafter, partial(self._workload, request, batches[-1]), images)

    def tree_for_batch(self, images: int) -> TreePolicy:
        """The tree policy for `images` images at once; under `auto`, windows shrink as batches grow."""
        return self._resolve_tree(self.sample_request(images))

    def measure_costs(self, images: int = 1) -> autotune.PassCosts | autotune.WindowCosts:
        """Measure anew what passes cost here with `images` at once, and store it for the `auto` tree."""
        request = self.sample_request(images)
        batch, *_ = autotune.measured_batches(images, self.drafter, is_captured=self.graphs is not None)
        workload = self._workload(request, batch)
        measure = autotune.measure_again if self.drafter.proposes == "tree" else autotune.measure_windows_again
        return measure(workload)

    def _workload(self, request: GenerationRequest, batch: int) -> autotune.TimedDecode:
        """A decode of `batch` images like that of the request, for measuring costs."""
        arch, graphs = self.model.target.net.arch, self.graphs
        layout, temperature = self.model.make_layout(request.size), request.temperature
        with self._library_bars():
            prompt = self.model.make_prompt(request.prompts[0], request.negative_prompts[0], request.size)
        return autotune.TimedDecode(
            key=(
                self.model.family,
                arch.dim,
                arch.layers,
                self.drafter_name,
                self.dtype,
                self.numerics,
                *([] if self.weights == "full" else [self.weights]),
                f"batch {batch}",
            ),
            target=self.model.target,
            drafter=self.drafter,
            prompts=[prompt] * batch,
            sampler=Sampler(layout, range(batch), temperature=temperature, device=self.device),
            guidance=request.guidance,
            # The buffers of a large batch are freed after the measurement.
            graphs=graphs if graphs is None or batch <= autotune.MAX_BATCH else graphs.with_min_bucket(1),
        )

    def _choices(self) -> tuple[dict[str, str], Path | None]:
        """Drafter, tree and verifier by names that `from_pretrained` can build; raises for objects without one.

        Also the folder of a drafter that did not come with the model.
        """
        autotune.build_tree(self.tree_name)
        verifiers.build(self.verifier_name)
        source, is_shipped = self._drafter.source, self.drafter_name in [p.name for p in self.model.drafter_folders]
        if source is None:
            drafters.build(self.drafter_name)
        folder = None if source is None or is_shipped else Path(source).expanduser()
        choices = {"drafter": self.drafter_name, "tree": self.tree_name, "verifier": self.verifier_name}
        choices |= {"weights": self.weights} if is_quantized(self.weights) else {}
        return choices, folder if folder is not None and folder.is_dir() else None  # else it is a hub id

    def push_drafter_to_hub(
        self, name: str, *, base_model: str | None = None, token: str | None = None, private: bool = False
    ) -> str:
        """Upload the trained drafter in use with its model card; `drafter=name` loads it again. Returns the address.

        `base_model` is the hub's name of the model, for the card of one that was loaded from a folder.
        """
        with tempfile.TemporaryDirectory() as temporary, self._library_bars():
            folder = save_drafter_repository(self._drafter.source, self.model, Path(temporary), name, base_model)
            return upload_folder(folder, name, token=token, private=private)


def check_runtime(device: torch.device, compile: Compile, numerics: Numerics, weights: str) -> None:
    """Raise for ways to run passes that do not go together, before a model is downloaded or loaded."""
    _check_numerics(numerics, weights)
    make_graph_cache(device, compile, numerics)


def check_parts(
    *, drafter: str | Drafter, tree: str | TreePolicy, verifier: str | Verifier, proposal: str = "auto"
) -> None:
    """Raise for parts that no pipeline can have, before its model is downloaded or loaded."""
    check_drafter(drafter)
    _check_proposal(proposal)
    _check_part("tree", tree, "plan")
    autotune.build_tree(tree)
    _check_part("verifier", verifier, "verify")
    if verifier != "auto":
        verifiers.build(verifier)


def _check_numerics(numerics: Numerics, weights: str) -> None:
    if not isinstance(numerics, str) or numerics not in get_args(Numerics):
        raise unknown("numerics", numerics, get_args(Numerics))
    if numerics == "fastest" and is_quantized(weights):
        raise ConfigError(
            f"{weights} weights are multiplied by row-invariant kernels; leave out numerics 'fastest', or the weights."
        )


def _check_proposal(name: str) -> None:
    if not isinstance(name, str) or name not in ("auto", *get_args(Proposal)):
        raise unknown("proposal", name, ("auto", *get_args(Proposal)))


def check_token_stats(mode: object) -> None:
    """Raise a ConfigError for a misspelt mode."""
    if not isinstance(mode, str) or mode not in get_args(TokenStatsMode):
        raise unknown("token_stats", mode, get_args(TokenStatsMode))


def check_call_drafter(drafter: object) -> None:
    """Raise a ConfigError for what cannot draft in a call, such as a name."""
    if drafter is not None and (isinstance(drafter, type) or not callable(getattr(drafter, "open", None))):
        raise ConfigError(f"the drafter of a call is an object, not {drafter!r}; names are for pipe.drafter.")


def _check_part(name: str, spec: object, method: str) -> None:
    if not isinstance(spec, str) and (isinstance(spec, type) or not callable(getattr(spec, method, None))):
        raise ConfigError(f"a {name} must be a name or have a {method}() method, which {spec!r} lacks.")
