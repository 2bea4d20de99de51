"""Timelines and training curves as SVG for a page. Deterministic, without scripts, styles of its own and dates.

Ink is the page's own (`var(--ink)`), so that one picture serves light and dark. Colours are those of Okabe and Ito, which
colour-blind readers can distinguish.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from reports.text import number, one_line
from reports.timeline import Bar, Mark, Server, Timeline, Training, in_flight, packed, version_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch

WIDTH = 1080.0
"""Width of a picture in points. All sizes here are points; the page scales the picture."""
LEFT, RIGHT, TOP, BOTTOM = 118.0, 12.0, 26.0, 36.0
ACROSS = WIDTH - LEFT - RIGHT
"""Width of the axes."""
CALL_ROWS, CONTROL_ROWS, MARK_ROWS, SERVER_ROWS = 10, 6, 6, 24
"""Most rows of each kind. A server with more requests at a time is drawn as a density."""
FONT, SMALL = 10.0, 8.5
CHARACTER = 5.0
"""Approximate width of a character of a small label."""
INK, FAINT = "#1d1e1f", "#8d8e8f"
"""Placeholders for the page's colours while drawing."""
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442")
"""Colours of policy versions and of stacks (Okabe and Ito)."""
WRONG = "#d55e00"


def timelines(lines: Sequence[Timeline], name: str) -> str:
    """SVG of one scenario on one or several stacks, one below the other on the same scale of time.

    `name` prefixes every id, so that one page can hold several pictures.
    """
    versions = _versions_of(lines)
    span = _span(lines, versions)
    drawn = [_Lanes(line, span, versions) for line in lines]
    height = sum(TOP + one.height + BOTTOM for one in drawn) + 16
    with _figure(height) as figure:
        top = height
        for one in drawn:
            top -= TOP + one.height
            axes = figure.add_axes((LEFT / WIDTH, top / height, ACROSS / WIDTH, one.height / height))
            one.draw(axes)
            top -= BOTTOM
        _legend(figure, drawn)
        return _svg(figure, name)


def curves(runs: Sequence[Training], name: str) -> str:
    """SVG of evaluation reward and log-probability gap by step, with all stacks in one pair of axes. A bound is dotted. Axes
    without data are hidden."""
    height = 330.0
    with _figure(height) as figure:
        gaps = [run.gap for run in runs if run.gap is not None]
        left, right = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.06, right=0.985, top=0.86, bottom=0.3, wspace=0.16)
        for place, run in enumerate(runs):
            # Later curves are narrower, so that equal curves are both visible.
            colour, wide = PALETTE[place % len(PALETTE)], 3.4 / (1 + 1.6 * place)
            style: dict[str, Any] = {
                "color": colour,
                "linewidth": wide,
                "marker": "os^D"[place % 4],
                "markersize": wide + 3,
            }
            left.plot(*_xy(run.reward), label=_plain(run.target), **style)
            for what, dashes in (("mean", "-"), ("p99", "--")):
                steps = run.gap.steps if run.gap is not None else []
                points = [(gap.step, size) for gap in steps if (size := getattr(gap, what)) > 0]
                right.plot(*_xy(points), label=f"{_plain(run.target)}, {what}", linestyle=dashes, **style)
        for bound in sorted({gap.bound for gap in gaps if gap.bound is not None}):
            right.axhline(bound, label=f"bound of a token: {number(bound)}", color=WRONG, linestyle=":", linewidth=1)
        left.set_title("Evaluation reward", loc="left", fontsize=FONT + 1)
        left.set_ylabel("mean reward")
        right.set_title("Trainer's log-probabilities against the rollouts', absolute", loc="left", fontsize=FONT + 1)
        right.set_ylabel("nats")
        if gaps:
            right.set_yscale("log")
            right.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
            right.yaxis.set_minor_formatter(lambda *_: "")
        for axes, columns in ((left, 2), (right, 2)):
            axes.set_xlabel("training step")
            axes.tick_params(labelsize=SMALL)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(visible=True, axis="y", color=FAINT, alpha=0.3, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_visible(any(len(line.get_xdata()) for line in axes.lines))
            if axes.lines:
                axes.legend(
                    loc="upper left",
                    bbox_to_anchor=(-0.02, -0.17),
                    ncols=columns,
                    frameon=False,
                    fontsize=SMALL,
                    handlelength=4,
                )
        return _svg(figure, name)


def _xy(curve: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]


# --- lanes of a timeline --------------------------------------------------------------------------------------------


class _Lanes:
    """One timeline, laid out in lanes from top to bottom: y grows downwards, in points."""

    def __init__(self, line: Timeline, span: float, versions: list[int]) -> None:
        self.line, self.versions, self.span = line, versions, span
        self.unit, self.scale = ("s", 1.0) if span >= 0.5 else ("ms", 1e3)
        self.point = self.span / ACROSS
        """Seconds per point."""
        self.height = self.servers_at = self.servers_end = 0.0
        self.used: set[str] = set()
        self.lanes: list[tuple[float, float, str]] = []
        self.marks = self._rows([(m.at, m.at + self._room(_mark_name(m))) for m in line.marks], MARK_ROWS, 12, "marks")
        self.calls = self._rows([(b.start, b.end) for b in line.calls], CALL_ROWS, 12, "calls")
        spans = [(b.start, self._labelled(b)) for b in line.controls]
        self.controls = self._rows(spans, CONTROL_ROWS, 13, "control")
        self.servers_at = self.height
        self.servers = [self._server(server) for server in line.servers]
        self.servers_end = self.height
        if line.versions:
            self.lanes.append((self.height, 14, "weights in force"))
            self.height += 20

    def _room(self, label: str) -> float:
        """Seconds that a label takes on the scale."""
        return _wide_label(label) * self.point

    def _labelled(self, bar: Bar) -> float:
        """End of a bar with its label, in seconds."""
        room, wide = self._room(self._name(bar)), self._wide(bar)
        return bar.end if room <= wide else bar.start + wide + room

    def _rows(
        self, spans: list[tuple[float, float]], most: int, high: float, name: str
    ) -> list[tuple[int, float, float]]:
        """(index, top, height) of the shown spans. The lane's name counts the hidden ones. No lane without spans."""
        if not spans:
            return []
        rows = packed(spans)
        hidden = sum(row >= most for row in rows)
        used = min(max(rows) + 1, most)
        note = f"{name}\n({hidden} not shown)" if hidden else name
        tall = max(used * high, 24 if hidden else 0)
        self.lanes.append((self.height, tall, note))
        top = self.height
        self.height += tall + 7
        return [(at, top + row * high, high) for at, row in enumerate(rows) if row < most]

    def _server(self, server: Server) -> tuple[Server, float, float, list[int] | None]:
        """(server, top, height of a row, rows). Rows are None if there are too many: the density is drawn instead."""
        rows = packed([(e.start, max(e.end, e.start + 2 * self.point)) for e in server.executions])
        count = max(rows, default=0) + 1
        dense = count > SERVER_ROWS
        high = 4.0 if count > 12 else 6.0 if count > 6 else 8.0
        tall = 56.0 if dense else max(count * high, 12.0)
        name = _plain(server.name, 18)
        top = self.height
        self.lanes.append((top, tall, f"{name}\n{len(server.executions)} requests" if tall >= 24 else name))
        self.height += tall + 7
        return server, top, high, None if dense else rows

    # --- drawing

    def draw(self, axes: Axes) -> None:
        self._frame(axes)
        self._pauses(axes)
        self._bars(axes, [(self.line.calls[at], top, high) for at, top, high in self.calls])
        self._bars(axes, [(self.line.controls[at], top, high) for at, top, high in self.controls])
        for server, top, high, rows in self.servers:
            if rows is None:
                self._density(axes, server, top)
            else:
                self._executions(axes, server, top, high, rows)
        self._versions(axes)
        self._marks(axes)

    def _frame(self, axes: Axes) -> None:
        """Names of lanes, scale of time and title, drawn one by one: matplotlib's own axis takes half of the time."""
        from matplotlib.ticker import MaxNLocator

        across = self.span * self.scale
        axes.set_xlim(0, across)
        axes.set_ylim(self.height, -2)
        axes.set_axis_off()
        unit = self.point * self.scale
        title = f"{_plain(self.line.target, 60)}   {_plain(self.line.scenario, 80)} @ {self.line.topology}"
        axes.text(0, -9, title, fontsize=FONT, fontweight="bold")
        for top, tall, name in self.lanes:
            axes.text(
                -5 * unit, top + tall / 2, name, fontsize=SMALL, ha="right", va="center", linespacing=1.05
            )  # fmt: skip
        ticks = [
            float(x) for x in MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]).tick_values(0, across) if 0 <= x <= across
        ]
        lines: dict[str, Any] = {"color": FAINT, "alpha": 0.25, "linewidth": 0.5, "zorder": 0.5}
        _ticks(axes, [(x, -2) for x in ticks], self.height + 2, **lines)
        _strokes(axes, [((0, top - 3.5), (across, top - 3.5)) for top, _, _ in self.lanes[1:]], **lines)
        axis = [((0.0, self.height), (across, self.height)), *(((x, self.height), (x, self.height + 3)) for x in ticks)]
        _strokes(axes, axis, color=FAINT, linewidth=0.8, clip_on=False)
        for x in ticks:
            axes.text(x, self.height + 12, f"{x:.6g}", fontsize=SMALL, ha="center")
        what = f"{self.unit} since the scenario began"
        axes.text(across / 2, self.height + 22, what, fontsize=SMALL, ha="center")
        if not self.lanes:
            axes.text(0, 4, "nothing was asked", fontsize=SMALL)

    def _bars(self, axes: Axes, bars: Sequence[tuple[Bar, float, float]]) -> None:
        """Bars with their labels inside or beside them. If the next bar leaves no room, the label is omitted."""
        boxes: dict[tuple[str, bool], list[tuple[float, float, float, float]]] = {}
        following: dict[float, float] = {}
        for bar, top, high in reversed(bars):
            wide, label = self._wide(bar), self._name(bar)
            box = (bar.start * self.scale, top + 1, wide * self.scale, high - 2)
            boxes.setdefault((self._colour_of(bar), bar.failed), []).append(box)
            if self._room(label) <= wide:
                self._text(axes, bar.start + 3 * self.point, top + high / 2, label)
            elif bar.start + wide + self._room(label) <= following.get(top, self.span):
                self._text(axes, bar.start + wide + 2 * self.point, top + high / 2, label)
            following[top] = bar.start
        for (colour, failed), places in boxes.items():
            self.used |= {"failed"} if failed else set()
            edge = {"edgecolor": WRONG, "linewidth": 1.2} if failed else {"linewidth": 0}
            _boxes(axes, places, facecolor=colour, alpha=0.4, **edge)

    def _wide(self, bar: Bar) -> float:
        """Seconds: one point less than the duration, so that touching bars stay distinct, but at least 1.5 points."""
        return max(bar.end - bar.start - self.point, 1.5 * self.point)

    def _name(self, bar: Bar) -> str:
        return _bar_name(bar, self.versions)

    def _text(self, axes: Axes, at: float, y: float, label: str) -> None:
        axes.text(at * self.scale, y, label, fontsize=SMALL - 0.5, va="center_baseline", clip_on=True)

    def _colour_of(self, bar: Bar) -> str:
        if bar.version is not None:
            return self._colour(bar.version)
        return INK if bar.kind in ("pause", "training") else FAINT

    def _colour(self, version: int | None) -> str:
        """The colour of a policy version; ink for an unknown one."""
        if version is None or version not in self.versions:
            return INK
        return PALETTE[self.versions.index(version) % len(PALETTE)]

    def _pauses(self, axes: Axes) -> None:
        """Shade pauses over the servers: engines should make no tokens there."""
        boxes = [
            (
                p.start * self.scale,
                self.servers_at - 2,
                max(p.end - p.start, self.point) * self.scale,
                self.servers_end - self.servers_at,
            )
            for p in self.line.pauses
        ]
        if boxes and self.line.servers:
            self.used.add("paused")
            _boxes(axes, boxes, facecolor=INK, alpha=0.13, linewidth=0)

    def _executions(self, axes: Axes, server: Server, top: float, high: float, rows: list[int]) -> None:
        x, gap = self.scale, 2.0 if high > 6 else 1.0
        bars = [
            (e.start * x, top + row * high + gap / 2, max(e.end - e.start, 1.5 * self.point) * x, high - gap)
            for e, row in zip(server.executions, rows, strict=True)
        ]
        if bars:
            self.used.add("request")
            _boxes(axes, bars, facecolor=FAINT, alpha=0.4, linewidth=0)
        ticks: dict[int | None, list[tuple[float, float]]] = {}
        for e, row in zip(server.executions, rows, strict=True):
            for at in self._apart(e.steps):
                ticks.setdefault(self.line.version_at(at), []).append((at * x, top + row * high + gap / 2))
        for version, places in ticks.items():
            self.used.add("step")
            _ticks(axes, places, high - gap, color=self._colour(version), linewidth=0.9)
        ended = [(e, row) for e, row in zip(server.executions, rows, strict=True) if e.aborted]
        if ended:
            self.used.add("aborted")
            axes.plot(
                [e.end * x for e, _ in ended], [top + (row + 0.5) * high for _, row in ended],
                linestyle="none", marker="x", color=WRONG, markersize=5, markeredgewidth=1.4, clip_on=False,
            )  # fmt: skip

    def _apart(self, steps: Sequence[float]) -> Iterator[float]:
        """Distinguishable steps: at least 1.5 points after the one before."""
        last = float("-inf")
        for at in steps:
            if at - last >= 1.5 * self.point:
                last = at
                yield at

    def _density(self, axes: Axes, server: Server, top: float) -> None:
        """How many requests were in flight, in place of rows."""
        self.used.add("density")
        points = in_flight(server.executions)
        most = max(count for _, count in points)
        outline, before = [(points[0][0] * self.scale, top + 56.0)], 0
        for _, group in itertools.groupby(points, key=lambda point: int(2 * point[0] / self.point)):  # half a point
            changes = list(group)
            counts = [count for _, count in changes]
            x = changes[0][0] * self.scale
            outline += [(x, top + 56 - 52 * count / most) for count in dict.fromkeys([before, max(counts), counts[-1]])]
            before = counts[-1]
        _area(axes, [*outline, (points[-1][0] * self.scale, top + 56.0)], facecolor=FAINT, alpha=0.5, linewidth=0)
        peak = next(at for at, count in points if count == most)
        self._text(axes, peak + 4 * self.point, top + 10, f"{most} in flight at most")
        ticks: dict[int | None, set[float]] = {}
        for at in self._apart(sorted(at for e in server.executions for at in e.steps)):
            ticks.setdefault(self.line.version_at(at), set()).add(at)
        for version, places in ticks.items():
            self.used.add("step")
            _ticks(
                axes,
                [(at * self.scale, top + 50) for at in sorted(places)],
                6,
                color=self._colour(version),
                linewidth=0.9,
            )

    def _versions(self, axes: Axes) -> None:
        if not self.line.versions:
            return
        self.used.add("versions")
        top = self.lanes[-1][0]
        for v in self.line.versions:
            end = max(v.end, v.start) if v is not self.line.versions[-1] else self.span
            _boxes(
                axes, [(v.start * self.scale, top, (end - v.start) * self.scale, 14)],
                facecolor=self._colour(v.version), alpha=0.45, linewidth=0,
            )  # fmt: skip
            name = version_name(v.version, self.versions)
            short = next((n for n in (name, name.split()[-1]) if self._room(n) <= end - v.start), None)
            if short is not None:
                self._text(axes, v.start + 3 * self.point, top + 7, short)

    def _marks(self, axes: Axes) -> None:
        if self.marks:
            self.used.add("mark")
        for at, top, high in self.marks:
            mark = self.line.marks[at]
            x = mark.at * self.scale
            axes.plot([x, x], [top + 2, self.height], color=INK, linewidth=0.6, linestyle=(0, (2, 2)), alpha=0.6)
            self._text(axes, mark.at + 3 * self.point, top + high / 2, _mark_name(mark))


def _wide_label(label: str) -> float:
    """Approximate width of a small label in points, with its margin."""
    return len(label) * CHARACTER + 6


def _bar_name(bar: Bar, versions: Sequence[int]) -> str:
    """The label of a bar, with the policy version that it loads or makes: "sync → 2"."""
    if bar.version is None:
        return _plain(bar.label, 60)
    return _plain(f"{bar.label} → {version_name(bar.version, versions).removeprefix('version ')}", 60)


def _mark_name(mark: Mark) -> str:
    return _plain(f"{mark.name} {mark.step}", 40)


def _span(lines: Sequence[Timeline], versions: Sequence[int]) -> float:
    """Seconds across the axes, with room for the labels of the last control calls and marks."""
    seconds = max([line.seconds for line in lines] + [1e-9])
    labels = [(m.at, _mark_name(m)) for line in lines for m in line.marks]
    labels += [
        (bar.end, name)
        for line in lines
        for bar in line.controls
        if _wide_label(name := _bar_name(bar, versions)) > (bar.end - bar.start) / seconds * ACROSS - 4
    ]
    return max([1.02 * seconds, *(at * ACROSS / (ACROSS - _wide_label(name) - 6) for at, name in labels)])


def _versions_of(lines: Sequence[Timeline]) -> list[int]:
    """All policy versions of a picture in order of appearance. Each has one colour on all stacks."""
    made = [(b.end, b.version) for line in lines for b in line.controls if b.version is not None]
    loaded = [(v.start, v.version) for line in lines for v in line.versions]
    return list(dict.fromkeys(version for _, version in sorted(loaded + made)))


def _legend(figure: Figure, drawn: Sequence[_Lanes]) -> None:
    """A legend of the elements that the picture contains."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = set().union(*(one.used for one in drawn))
    coloured = any(one.line.versions for one in drawn)
    entries: dict[str, tuple[str, Any]] = {
        "request": ("request in an engine", Patch(facecolor=FAINT, alpha=0.4)),
        "density": ("requests in flight", Patch(facecolor=FAINT, alpha=0.5)),
        "step": (
            "tokens, in the colour of the weights in force" if coloured else "tokens",
            Line2D([], [], linestyle="none", marker="|", color=PALETTE[0] if coloured else INK, markersize=7),
        ),
        "aborted": (
            "ended by an abort",
            Line2D([], [], linestyle="none", marker="x", color=WRONG, markersize=5, markeredgewidth=1.4),
        ),
        "paused": ("paused: from the return of pause to resume", Patch(facecolor=INK, alpha=0.13)),
        "failed": ("call that failed", Patch(facecolor="none", edgecolor=WRONG, linewidth=1.2)),
        "mark": ("noted by the scenario", Line2D([], [], color=INK, linewidth=0.6, linestyle=(0, (2, 2)))),
    }
    shown = [entry for name, entry in entries.items() if name in used]
    if shown:
        figure.legend(
            [handle for _, handle in shown], [label for label, _ in shown], loc="lower left",
            bbox_to_anchor=(LEFT / WIDTH - 0.012, 0), ncols=len(shown), frameon=False, fontsize=SMALL,
            handlelength=1.4, columnspacing=1.6, borderpad=0,
        )  # fmt: skip


# --- shapes and SVG -------------------------------------------------------------------------------------------------


def _boxes(axes: Axes, boxes: Sequence[tuple[float, float, float, float]], **style: Any) -> None:
    """Many (x, y, width, height) as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [
        point for x, y, wide, high in boxes
        for point in ((x, y), (x + wide, y), (x + wide, y + high), (x, y + high), (x, y))
    ]  # fmt: skip
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    _add(axes, PathPatch(Path(corners, codes), **style))


def _area(axes: Axes, outline: Sequence[tuple[float, float]], **style: Any) -> None:
    """The area inside an outline of (x, y)."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    _add(axes, PathPatch(Path(list(outline), closed=False), **style))


def _ticks(axes: Axes, places: Sequence[tuple[float, float]], high: float, **style: Any) -> None:
    """Many upright strokes from (x, y) downwards as one path."""
    _strokes(axes, [((x, y), (x, y + high)) for x, y in places], **style)


def _strokes(axes: Axes, strokes: Sequence[tuple[tuple[float, float], tuple[float, float]]], **style: Any) -> None:
    """Many strokes from point to point as one path."""
    if not strokes:
        return
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    ends = [point for stroke in strokes for point in stroke]
    _add(axes, PathPatch(Path(ends, [Path.MOVETO, Path.LINETO] * len(strokes)), fill=False, **style))


def _add(axes: Axes, patch: PathPatch) -> None:
    """Add a patch without measuring it: the limits are set already, and measuring takes most of the time."""
    axes.add_artist(patch)
    if patch.get_clip_on():
        patch.set_clip_path(axes.patch)


@contextlib.contextmanager
def _figure(height: float) -> Iterator[Figure]:
    """A figure of `WIDTH` × `height` points. The settings keep text as text and ids stable."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "rollout-parity", "font.family": "sans-serif", "font.size": FONT,
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": FAINT,
        "axes.linewidth": 0.6, "xtick.major.width": 0.6, "path.simplify": False, "text.parse_math": False, "axes.labelsize": SMALL,
    }  # fmt: skip
    with mpl.rc_context(settings), warnings.catch_warnings():
        # Matplotlib only measures it; the page draws it.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        yield Figure(figsize=(WIDTH / 72, height / 72), facecolor="none")


_USED = re.compile(r'(?:url\(#|xlink:href="#)([^)"]+)')
_ID = re.compile(r' id="([^"]*)"')
_POINTS = re.compile(r' d="([^"]*)"')
_UPRIGHT = re.compile(r"M (\S+) (\S+) L \1 (\S+) (?=M|$)")
_BOX = re.compile(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 z *")
_GROUP = re.compile(r"</?g(?: [^>]*)?/?>\s*")
_NUMBER = re.compile(r"-?\d+\.\d{2,}")


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element. Unused ids are removed, others get the prefix `name`. Colours are the page's."""
    out = io.StringIO()
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_visible(False)
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    used = set(_USED.findall(text))
    text = _ID.sub(lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", text)
    text = _POINTS.sub(lambda m: f' d="{_dense(m[1])}"', text)
    text = re.sub(r" font-family: [^;\"]*;| transform=\"rotate\(-0 [^)]*\)\"|(?<=\n) +", "", text)
    text = _GROUP.sub(_Groups(), text)
    text = text.replace(INK, "var(--ink, #777)").replace(FAINT, "var(--faint, #888)")
    head = f'<svg class="picture" role="img" viewBox="0 0 {WIDTH:g} {figure.get_figheight() * 72:g}" '
    head += 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" version="1.1" stroke-linejoin="round">'
    return re.sub(r"^<svg[^>]*>", head, text).strip()


class _Groups:
    """Removes groups without attributes, and their ends."""

    def __init__(self) -> None:
        self.kept: list[bool] = []

    def __call__(self, tag: re.Match[str]) -> str:
        text = tag[0].strip()
        match text:
            case "<g/>":
                return ""
            case "</g>":
                return tag[0] if self.kept.pop() else ""
            case _:
                self.kept.append(text != "<g>")
                return tag[0] if self.kept[-1] else ""


def _dense(points: str) -> str:
    """The same path in fewer characters: rounded to a tenth of a point, upright and level strokes as one number."""
    text = _NUMBER.sub(_short, points).replace("\n", "")
    text = _UPRIGHT.sub(r"M\1 \2V\3", text)
    text = _BOX.sub(r"M\1 \2H\3V\4H\1Z", text)
    return text.strip()


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _plain(text: str, most: int = 40) -> str:
    """`text` on one line, visible, and no longer than `most` characters."""
    shown = one_line(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


__all__ = ["curves", "timelines"]
