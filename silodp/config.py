"""The one description of a run: what a TOML file may say, checked before anything is spent or written."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from silodp import registry


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _none_says_nothing(cls, tree: Any) -> Any:
        """TOML has no way to write None, and what is said may mean a choice (to `auto`): so None says nothing."""
        return {k: v for k, v in tree.items() if v is not None} if isinstance(tree, dict) else tree

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and "bool" not in str(annotation):
            raise ValueError("true and false are for switches; give a number or text")
        return value


class GrownSection(Section):
    """A section to which keys were added. A plan that does not use them keeps its fingerprint, and its approvals."""

    added: ClassVar[tuple[str, ...]]

    @model_serializer(mode="wrap")
    def _without_unused(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: own for name, own in written(self).items() if name not in self.added or own is not None}


class DataConfig(Section):
    """Where records come from and which silo holds which."""

    source: str | list[str] | None = Field(
        default=None,
        description="a dataset's name, a file, or a folder, pattern or list with one file per silo",
    )
    silos: int | None = Field(default=None, ge=1, description="number of silos a single table is divided into")
    partition: str | None = Field(default=None, description="how a table is divided: see `silodp list`")
    records: int | None = Field(default=None, ge=1, description="records of each silo (for `account`, or to cut silos)")
    sizes: list[int] | None = Field(default=None, description="records of each silo, when they differ")
    target: str | None = Field(default=None, description="name of the target column")
    silo_column: str | None = Field(default=None, description="column that says which silo a row belongs to")
    task: Literal["classification", "regression"] | None = Field(
        default=None, description="what the target is; found from it when left out"
    )
    alpha: float | None = Field(default=None, gt=0, description="concentration of the dirichlet partition")
    preprocess: list[str] = Field(default=[], description='steps in order, e.g. ["standardise", "pca:50", "bias"]')
    test: float | str | None = Field(default=None, description="share held out for the test, or a file")
    classes: list[str | int] | None = Field(default=None, description="the labels, when known beforehand")
    per_class: int | None = Field(default=None, ge=1, description="keep the first so many records of each class")
    limit: int | None = Field(default=None, ge=1, description="keep so many records, drawn by `seed`")
    seed: int = Field(default=0, ge=0, description="public seed of split, subsample and partition")


class ModelConfig(Section):
    """The model: what a record's loss is."""

    kind: str = Field(
        default="logistic",
        description="linear, ridge, logistic, softmax, mlp, cnn, or MODULE:FUNCTION giving a Model",
    )
    hidden: list[int] = Field(default=[], description="widths of the hidden layers of an mlp")
    activation: str | None = Field(default=None, description="softplus, sigmoid, relu, tanh (mlp, cnn)")
    norm: Literal["none", "group"] = Field(
        default="none", description="group: hidden layers of an mlp or cnn are normalised, each record by itself"
    )
    views: list[str] = Field(
        default=[],
        description='of images, e.g. ["flip", "shift:2"]: a record has the mean of its views\' gradients, clipped once',
    )
    loss: str | None = Field(default=None, description="squared or cross-entropy (mlp)")
    regulariser: float = Field(default=0.0, ge=0, description="strength of ridge's |x|^2/2 or logistic's x^2/(1+x^2)")
    regulariser_clip: Literal["outside", "inside"] = Field(
        default="outside", description="inside: part of every record's loss, hence clipped and noised, as in the papers"
    )
    bias: bool = Field(default=True, description="whether layers have a constant term")
    initial: Literal["default", "zeros", "normal"] = Field(default="default", description="first parameters")
    initial_scale: float | None = Field(default=None, gt=0, description="standard deviation for initial = normal")
    class_weights: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = Field(
        default=None, description="of every class, public: how much a record of it counts beside one of the largest"
    )
    engine: Literal["auto", "structured", "general"] = Field(
        default="auto", description="how clipped sums of gradients are computed; auto takes the fast one where it fits"
    )
    parameters: int | None = Field(default=None, ge=1, description="d, where `account` has no model to ask")


class OpenSection(Section):
    """A section in which parts from outside have options of their own: see `check_own_options`."""

    model_config = ConfigDict(extra="allow")

    @property
    def own(self) -> dict[str, Any]:
        """The keys that only a part from outside knows."""
        return dict(self.model_extra or {})

    @property
    def given(self) -> dict[str, Any]:
        """Everything that has a value, keys from outside included."""
        return self.model_dump(exclude_none=True)


# Within float32's numbers, with room for what is computed from a clip norm: 2^20 times its smallest one, and more.
CLIP_NORM: dict[str, Any] = {"ge": 1e-18, "le": 1e18}


class ScaleConfig(Section):
    """A stage before all others: private centre and scale of columns without a public range (silodp.stages.scale)."""

    share: float = Field(default=0.1, gt=0, lt=1, description="part of mu^2 that it takes")
    columns: list[int] | None = Field(default=None, min_length=1, description="features, from 0 on; all when left out")


class WhitenConfig(GrownSection):
    """Stages before training: features are centred and whitened by private moments (silodp.stages.whiten)."""

    added = ("blocks", "lengthen", "ridge")

    share: float = Field(default=0.2, gt=0, lt=1, description="part of mu^2 that the second moment takes")
    moment: Literal["full", "diagonal", "blocks"] = Field(
        default="full",
        description="every pair of features, each by itself, or pairs within blocks: fewer numbers, hence less noise",
    )
    blocks: list[int] | None = Field(
        default=None,
        description='of moment = "blocks": for each feature the number of its block; known where pieces made them',
    )
    centre: float = Field(default=0.05, ge=0, lt=1, description="part of mu^2 that the mean takes; 0: no mean")
    clip: float = Field(default=1.5, **CLIP_NORM, description="longest features of a record, the constant 1 included")
    shorten: bool = Field(
        default=True, description="records longer than `clip` are shortened to it in all that follows, new ones too"
    )
    scale: float | list[float] | None = Field(
        default=None,
        description="public factor that makes features about 1 long, or one for each; 1 / sqrt(d) when left out",
    )
    lengthen: float | None = Field(
        default=None,
        gt=0,
        description="the most that steps grow by on whitened features; the number of their directions when left out",
    )
    ridge: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="added to the mean square of every direction before whitening, features being about 1 long",
    )
    target: float = Field(
        default=1.0, gt=0, description="expected deviation of a number to predict: the unit of clip norms of `auto`"
    )

    @model_validator(mode="after")
    def _one_length(self) -> WhitenConfig:
        each = self.scale if isinstance(self.scale, list) else [1.0 if self.scale is None else self.scale]
        if not each or not all(CLIP_NORM["ge"] <= own <= CLIP_NORM["le"] for own in each):
            raise ValueError("whiten.scale: give a positive number, or one for each feature, from 1e-18 to 1e18")
        if self.shorten and isinstance(self.scale, list):
            raise ValueError("whiten.shorten: not with a scale for each feature; set shorten = false")
        if self.blocks is not None and self.moment != "blocks":
            raise ValueError(f"whiten.blocks: without effect with moment = {self.moment!r}; leave it out")
        return self


class InterceptsConfig(Section):
    """A stage before training: silos' private label rates, from which each has an intercept (silodp.stages.rates)."""

    share: float = Field(default=0.05, gt=0, lt=1, description="part of mu^2 that the rates take")


class EvaluateConfig(Section):
    """A stage after training: private metrics over records that are held out (silodp.stages.evaluate)."""

    held_out: float = Field(
        default=0.2, gt=0, lt=1, description="part of every silo's records that is not trained on; has its own budget"
    )
    loss_bound: float = Field(default=4.0, gt=0, description="a record's loss counts as this at most")


class PrivacyConfig(OpenSection):
    """Who is trusted, and the target. Without epsilon, gdp or multipliers the run is not private."""

    trust: str = Field(default="untrusted", description="trusted, untrusted, aggregated, shuffled, or MODULE:CLASS")
    epsilon: float | None = Field(default=None, gt=0, description="target for every record of every silo")
    delta: float = Field(default=1e-5, gt=0, lt=1, description='far below 1 / records; or "1/n^2", n the largest silo')
    delta_rule: Literal["1/n^2"] | None = Field(default=None, description="how delta follows from the silos' sizes")
    unit: Literal["record", "user"] | int = Field(
        default="record",
        description="what the target protects: a record, k records of one silo, or all of a silo's (user)",
    )
    gdp: float | None = Field(default=None, gt=0, description="a Gaussian-DP mu in place of epsilon and delta")
    silo_targets: dict[str, float] | None = Field(
        default=None, description="another epsilon (or gdp, where that is given) for single silos, by name"
    )
    multipliers: dict[str, float] | None = Field(
        default=None, description="noise std over sensitivity, by stream: epsilon follows"
    )
    budget: float | None = Field(
        default=None, gt=0, description="with multipliers: stop before epsilon would exceed this"
    )
    calibration: Literal["exact", "paper"] = Field(
        default="exact", description="the noise that the target needs, or what the paper's formula prints"
    )
    split: float | Literal["optimal"] | None = Field(
        default=None, description="share of mu^2 given to the value stream (0.8 is DIFF2's u = 1.25), or optimal"
    )
    mask_amplification: bool = Field(default=False, description="count rand-k's mask as privacy amplification")
    colluding: int | None = Field(
        default=None,
        ge=0,
        description="trust aggregated: how many silos may work for the server; half of those of a round when left out",
    )
    missing: int | None = Field(
        default=None, ge=0, description="trust aggregated: how many silos a round may do without (0)"
    )

    @property
    def asked_delta(self) -> float | str:
        """As a config says it: a number or a rule."""
        return self.delta_rule or self.delta

    @model_validator(mode="before")
    @classmethod
    def _delta_by_rule(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("delta") == "1/n^2":
            return {name: value for name, value in given.items() if name != "delta"} | {"delta_rule": "1/n^2"}
        return given

    @field_validator("unit")
    @classmethod
    def _whole_group(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 1:
            raise ValueError("give 'record', 'user', or how many records of one silo are protected together")
        return value

    @field_validator("split")
    @classmethod
    def _share(cls, value: Any) -> Any:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError("give a share between 0 and 1, or 'optimal'")
        return value

    @field_validator("multipliers", "silo_targets")
    @classmethod
    def _nonnegative(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name, number in (value or {}).items():
            if not (number > 0 and math.isfinite(number)):
                raise ValueError(f"{name} = {number}: give a positive number")
        return value

    @model_validator(mode="after")
    def _one_target(self) -> PrivacyConfig:
        given = [name for name in ("epsilon", "gdp", "multipliers") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given together; give one of them")
        if self.budget is not None and self.multipliers is None:
            raise ValueError("budget goes with multipliers; a target epsilon is kept by its noise")
        if self.silo_targets and ((self.epsilon is None and self.gdp is None) or self.calibration == "paper"):
            raise ValueError("silo_targets go with epsilon or gdp for all other silos, and exact noise")
        return self

    def of_silo(self, name: str) -> PrivacyConfig:
        """What this silo's records are promised."""
        if not self.silo_targets or name not in self.silo_targets:
            return self
        key = "epsilon" if self.gdp is None else "gdp"
        return self.model_copy(update={key: self.silo_targets[name], "silo_targets": None})

    @property
    def strictest(self) -> PrivacyConfig:
        """The target of the silo that asks for most."""
        key = "epsilon" if self.gdp is None else "gdp"
        own = [] if not self.silo_targets else self.silo_targets.values()
        return self if not own else self.model_copy(update={key: min([getattr(self, key), *own]), "silo_targets": None})

    @property
    def private(self) -> bool:
        return self.epsilon is not None or self.gdp is not None or self.multipliers is not None


class AlgorithmConfig(OpenSection):
    """The algorithm and its numbers; names as in the table of symbols in the docs."""

    name: str = Field(default="spider", description="see `silodp list`; auto leaves nothing to choose")
    rounds: int = Field(default=50, ge=1, description="R: rounds of communication")
    stop_after: int | None = Field(default=None, ge=1, description="stop after this many rounds, with the noise of all")
    step_size: float | None = Field(default=None, gt=0, description="eta: how far a step goes")
    clip: float | None = Field(default=None, **CLIP_NORM, description="C1: clip norm of a record's gradient")
    clip_difference: float | None = Field(
        default=None, **CLIP_NORM, description="C2: clip of a difference per unit |x - y|"
    )
    clip_local: float | None = Field(default=None, **CLIP_NORM, description="C3: as C2, in local steps")
    capped: bool | None = Field(default=None, description="cap the clip of differences at 2 * clip")
    restart: int | None = Field(default=None, ge=1, description="T: rounds between fresh gradients")
    batch: int | None = Field(default=None, ge=1, description="b: records of a silo in a round; all when left out")
    batch_share: float | None = Field(
        default=None, gt=0, lt=1, description="in place of batch, under P_vec: the part of every silo's records"
    )
    sampling: Literal["full", "poisson", "fixed", "one-pass"] | None = Field(
        default=None, description="how a batch is drawn; the algorithm's own way when left out"
    )
    batch_difference: int | None = Field(
        default=None, ge=1, description="K2 of spider: records that answer with a difference; as `batch` when left out"
    )
    batch_first: int | None = Field(default=None, ge=1, description="B0: batch of the first round")
    batch_local: int | None = Field(default=None, ge=1, description="B2: batch of local steps")
    local_steps: int | None = Field(default=None, ge=1, description="K: local steps")
    momentum: float | None = Field(default=None, gt=0, le=1, description="beta")
    snapshot_probability: float | None = Field(default=None, gt=0, le=1, description="p of SVRG")
    epochs: int | None = Field(default=None, ge=1, description="epochs of prox-svrg between restarts of the whole")
    diameter: float | None = Field(default=None, gt=0, description="D of mu2's ball")
    weight_power: float | None = Field(default=None, ge=1, description="p of mu2's weights t^p (1)")
    gradient_bound: float | None = Field(default=None, gt=0, description="G: the longest gradient of a record's loss")
    smoothness: float | None = Field(
        default=None, gt=0, description="L: how fast a record's gradient can change (Lipschitz constant)"
    )
    heterogeneity: float | None = Field(
        default=None, gt=0, description="zeta: how far silos' Hessians are from their mean; 2 L when left out"
    )
    pl_constant: float | None = Field(default=None, gt=0, description="mu of the proximal PL inequality")
    theory: bool = Field(
        default=False,
        description="let the paper's theorem choose what is left out, from smoothness, gradient_bound, diameter, ...",
    )
    participation: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="M: silos in a round; all when left out; [low, high]: a random number of them"
    )
    schedule: Literal["random", "fixed"] = Field(
        default="random",
        description="fixed: drawn from the public seed beforehand, and only that is charged",
    )
    weights: Literal["equal", "size"] | None = Field(
        default=None,
        description="equal or size: weights of silos in the objective; size when left out, but equal where a paper's "
        "theorem or noise is asked for (theory, calibration) or a silo is protected as a whole (unit = user); under a "
        "shuffler size whatever is asked for, and equal with batch",
    )
    average: PositiveInt | str | dict[str, str | float] | None = Field(
        default=None,
        description="the mean of so many last iterates is the result; or of all, {kind = 'exponential', decay = 0.99} "
        "or {kind = 'polynomial', power = 1}",
    )
    compressor: str | None = Field(default=None, description="identity, rand-k, qsgd, natural, or MODULE:CLASS")
    keep: int | None = Field(default=None, ge=1, description="k of rand-k")
    levels: int | None = Field(default=None, ge=1, description="levels of qsgd")
    shifted: bool | None = Field(default=None, description="compress against a running shift")
    randomizer: str | None = Field(
        default=None,
        description="how a record's vector is hidden before a shuffler: duchi, privunit, pvec, or MODULE:CLASS",
    )
    grid: int | None = Field(default=None, ge=2, description="rounding levels of pvec (200)")
    fused: bool | None = Field(default=None, description="one message a record and round instead of two (psgm)")
    prox: str | dict[str, str | float] | list[dict[str, str | float]] = Field(
        default="none",
        description='none, a table such as {kind = "l1", strength = 0.1}, or a list of a penalty and a set; kinds: '
        "docs/algorithms/README.md",
    )
    optimiser: str | dict[str, str | float] | None = Field(
        default=None,
        description='what the server makes of estimates: heavy-ball, nesterov, adam, growing, or {kind = "adam", ...}',
    )
    step_decay: str | dict[str, str | float] | list[float] | None = Field(
        default=None,
        description='shorter steps later: linear, {kind = "polynomial", power = 0.5}, exponential, or a list with a '
        "factor for every round",
    )
    shift_rate: float | None = Field(
        default=None, gt=0, le=1, description="gamma of shifted compression; the theorem's when left out"
    )
    shift_decay: str | dict[str, str | float] | list[float] | None = Field(
        default=None, description="how gamma shrinks, as step_decay"
    )

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> AlgorithmConfig:
        if self.sampling in ("poisson", "fixed") and self.batch is None and self.batch_difference is None:
            raise ValueError(f"sampling = {self.sampling!r} has no effect without a batch; give batch, or leave it out")
        if self.batch_share is not None and (self.batch is not None or self.sampling is not None):
            raise ValueError(f"batch_share = {self.batch_share:g} goes without batch and sampling; leave them out")
        if self.sampling == "full" and self.batch is not None:
            raise ValueError(f"batch = {self.batch} has no effect with sampling = 'full'; leave one of them out")
        for option, compressor in (("keep", "rand-k"), ("levels", "qsgd")):
            own = self.compressor is None or registry.is_own("compressor", self.compressor)
            if getattr(self, option) is not None and own and self.compressor != compressor:
                raise ValueError(
                    f"{option} = {getattr(self, option)} has no effect without compressor = {compressor!r}"
                )
        for option in ("shifted", "shift_rate", "shift_decay"):
            if getattr(self, option) is not None and self.compressor is None:
                raise ValueError(f"{option} has no effect without a compressor; give one, or leave {option} out")
        if isinstance(self.participation, tuple) and self.participation[0] >= self.participation[1]:
            raise ValueError(f"participation = {list(self.participation)}: give a smaller and a larger number, or one")
        if self.schedule == "fixed" and self.participation is None:
            raise ValueError("schedule = 'fixed' has no effect when all silos take part; give participation")
        return self

    @property
    def performed(self) -> int:
        """The rounds that really take place."""
        return min(self.rounds, self.stop_after or self.rounds)


# Constants of the problem, from which a theorem chooses what a config leaves out.
THEORY_CONSTANTS = ("gradient_bound", "smoothness", "heterogeneity", "pl_constant")
# Keys that the run, the channel or the theorem takes care of, whatever the algorithm.
SHARED_KEYS = {
    "name", "rounds", "stop_after", "step_size", "prox", "batch", "batch_share", "sampling", "participation",
    "schedule", "weights", "average", "compressor", "keep", "levels", "shifted", "randomizer", "grid", "theory",
    "optimiser", "step_decay", "shift_rate", "shift_decay", *THEORY_CONSTANTS,
}  # fmt: skip


class RunConfig(Section):
    """Seeds, reporting, and where the run's directory goes."""

    seed: int = Field(default=0, ge=0, description="seed of the simulation; never used for what leaves a silo for real")
    every: int | None = Field(default=None, ge=1, description="rounds between history rows")
    output: str = Field(default="runs", description="folder of new runs' directories")
    mode: Literal["simulation", "messages"] = Field(
        default="simulation", description="messages: every silo is a process and draws its noise from the system"
    )
    test_seed: bool = Field(
        default=False,
        description="message mode: noise from `seed`, as in the simulation; not private",
    )
    per_silo: bool = Field(
        default=False,
        description="history columns of every silo, such as objective/NAME; not covered by the guarantee",
    )
    trajectory: bool = Field(default=False, description="keep the parameters of every history row")
    answers: bool = Field(default=False, description="message mode: keep what everybody may see, for audit --real")
    figures: list[Literal["png", "pdf", "svg"]] = Field(
        default=[], description="formats of the history's figure in figures/; report.html has it in any case"
    )

    @model_validator(mode="after")
    def _test_seed_is_for_messages(self) -> RunConfig:
        if self.test_seed and self.mode != "messages":
            raise ValueError("test_seed = true has no effect in a simulation, which is seeded; set mode = 'messages'")
        if self.answers and self.mode != "messages":
            raise ValueError("answers = true: a simulation sends none; set mode = 'messages'")
        return self


class SweepConfig(Section):
    """A grid over numbers, names and switches; combinations that differ in traced numbers share a program."""

    grid: dict[str, list[bool | float | str]] = Field(
        default={}, description='values by key, e.g. {"algorithm.step_size" = [0.1, 0.3]}'
    )
    select: str = Field(default="objective", description="history column by which the best setting is chosen")
    private_trials: float | None = Field(
        default=None,
        ge=1,
        description="mean number of trials of a private selection; none: not private",
    )


class Config(GrownSection):
    """A whole run: what a TOML file holds, section by section, checked.

    Args:
        data, model, privacy, scale, whiten, intercepts, algorithm, evaluate, run, sweep: the sections, each a dict or
            an object.

    Example:
        >>> import silodp
        >>> config = silodp.Config(algorithm={"name": "mu2", "rounds": 20}, privacy={"epsilon": 1.0})
        >>> config.algorithm.rounds, config.privacy.trust
        (20, 'untrusted')
    """

    added = ("intercepts",)

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    scale: ScaleConfig | None = None
    whiten: WhitenConfig | None = None
    intercepts: InterceptsConfig | None = None
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluate: EvaluateConfig | None = None
    run: RunConfig = RunConfig()
    sweep: SweepConfig = SweepConfig()
