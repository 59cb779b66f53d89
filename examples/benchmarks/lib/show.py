# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of result files. Each benchmark describes its own in a `Shown`.

What a run measured in short is a list of `Measure`s: each has one value for a case and a contender, of which the worst
one is stated, and may have bars that this project's own runs must reach. These were set for H200s.
"""

import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tabulate import tabulate

from . import results_file
from .colors import color_of, colors, tint
from .paired import interval
from .results_file import Group, groups, is_as_named

LARGER, SMALLER = "larger", "smaller"  # what is better
GIB, MIB = (lambda value: f"{value / 2**30:.2f}"), (lambda value: f"{value / 2**20:.0f}")
DERIVED = ("flops", "least_bytes", "bytes", "predicted_bytes")  # of a case: they follow from its other keys
MS = ("ms", "median_ms", "{:.3f}")
WIDTH = 10  # inches of a plot, 100 dots each: its letters stay readable at a page's width
STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 9, "axes.spines.top": False,
         "axes.spines.right": False}
STYLES = ("-", "--", ":", "-.")  # of the lines of one color
GRAY = "#444444"


class Value(NamedTuple):
    value: float
    contender: str
    case: dict


def bar(value: float, **where: Any) -> tuple[float, dict]:
    """What the worst case must reach, of those with the values of `where`."""
    return value, where


class Measure(NamedTuple):
    """One number for each case and contender.

    Attributes:
        what: its name.
        contenders: whose figure it is.
        over: another contender. The value is then a speed-up over it (its figure over the contender's) or, where
            smaller is better, a share of it (the contender's figure over its own).
        figure: the figure's name in the rows.
        when: takes a case; whether the measure is of it.
        form: how a value is printed.
        bars: each must be reached.
    """

    what: str
    contenders: tuple[str, ...]
    over: str | None = None
    figure: str = "median_ms"
    when: Callable[[dict], bool] = lambda case: True
    better: str = LARGER
    form: str = "{:.2f}x"
    bars: tuple[tuple[float, dict], ...] = ()

    def values(self, result: dict) -> list[Value]:
        """From the worst to the best, without rows whose experts did not run in what their contender's name says."""
        found = [Value(value, name, group.case) for group in groups(result) if self.when(group.case)
                 for name in self.contenders if name in group.rows and is_as_named(group.rows[name])
                 and (value := self._of(group, name)) is not None]
        return sorted(found, key=lambda one: one.value, reverse=self.better == SMALLER)

    def _of(self, group: Group, name: str) -> float | None:
        if self.over is None:
            return group.figure(name, self.figure)
        if self.better == SMALLER:
            return group.ratio(name, self.over, self.figure)
        return group.ratio(self.over, name, self.figure)

    def place(self, one: Value, keys: list[str]) -> str:
        """In words, where a value was measured; `keys`: of its case."""
        name = [one.contender] if len(self.contenders) > 1 else []
        return ", ".join(filter(None, [*name, described(one.case, keys)]))


class Shown(NamedTuple):
    """How the result files of one benchmark are shown.

    Attributes:
        benchmark: its name.
        measures: what is measured, in short.
        figures: (title, name in the rows, format or function) of what the table shows of each contender.
        plot: takes a result and matplotlib's pyplot.
        more_plots: further plots of a prepared result for its page, by the name that is added to the file's.
        wide: the table has a line for each case, and columns for each contender. Else a line for each of both.
        contenders: those that the table shows. Empty: all.
        ratios: (over, contender) of speed-ups that a wide table shows too, or that a long one shows over each `over`.
        prepare: makes the rows to show from those in the file, for example means over seeds.
        note: a line above the table.
        sentences: makes lines below the table from the prepared result.
    """

    benchmark: str
    measures: list[Measure]
    figures: list[tuple[str, str, Any]]
    plot: Callable[[dict, Any], None]
    wide: bool = True
    contenders: tuple[str, ...] = ()
    ratios: tuple[tuple[str, str], ...] = ()
    prepare: Callable[[dict], list[dict]] = lambda result: result["rows"]
    note: str = ""
    sentences: Callable[[dict], list[str]] = lambda result: []
    more_plots: Callable[[dict], dict[str, Callable]] = lambda result: {}

    def prepared(self, result: dict) -> dict:
        return {**result, "rows": self.prepare(result)}


# ---- tables -------------------------------------------------------------------------------------------------------


def markdown(lines: list[list], headers: list[str]) -> str:
    """A table of texts and None, without columns that are empty. Texts that begin with a digit or sign stand right."""
    kept = [i for i in range(len(headers)) if any(line[i] not in (None, "") for line in lines)]
    if not kept:
        return ""
    cells = [["" if line[i] is None else line[i] for i in kept] for line in lines]
    numeric = [all(not text or text[0] in "+-0123456789" for text in column) for column in zip(*cells, strict=True)]
    return tabulate(cells, [headers[i] for i in kept], tablefmt="pipe", disable_numparse=True,
                    colalign=["right" if is_number else "left" for is_number in numeric])


def _text(value: Any, form: str | Callable[[Any], str] = "{}") -> str | None:
    if value is None:
        return None
    return form(value) if callable(form) else form.format(value)


def varying(result: dict) -> list[str]:
    """The keys of cases that tell them apart."""
    cases = [group.case for group in groups(result)]
    keys = dict.fromkeys(key for case in cases for key in case if key not in DERIVED)
    return [key for key in keys if len({str(case.get(key)) for case in cases}) > 1]


def described(case: dict, keys: Iterable[str]) -> str:
    """Like "forward, dim 7168, experts 8"."""
    named = [(key, case[key]) for key in keys if case.get(key) is not None]
    return ", ".join(value if isinstance(value, str) else f"{key.replace('_', ' ')} {value}" for key, value in named)


def measures_table(shown: Shown, result: dict) -> str:
    """The worst, the middle and the best value of each measure, and where the worst one was measured."""
    keys, lines = varying(result), []
    for measure in shown.measures:
        values = measure.values(result)
        if values:
            numbers = (values[0].value, statistics.median(one.value for one in values), values[-1].value)
            lines.append([measure.what, *(measure.form.format(number) for number in numbers),
                          measure.place(values[0], keys)])
    return markdown(lines, ["measured", "worst", "median", "best", "worst case"])


def failures_table(result: dict) -> str:
    keys = varying(result)
    return markdown([[row["contender"], described(row["case"], keys),
                      row.get("failure") or row.get("error") or str(row.get("sqnr_db", ""))]
                     for row in result["rows"] if not row["correct"]], ["failed or wrong", "case", "why"])


def main_table(shown: Shown, result: dict) -> str:
    keys = varying(result)
    found = groups(result)
    names = shown.contenders or tuple(dict.fromkeys(name for group in found for name in group.rows))
    columns = [[_text(group.case.get(key)) for key in keys] for group in found]
    headers = [key.replace("_", " ") for key in keys]
    if shown.wide:
        lines = [[*case, *(_text(group.figure(name, figure), form) for _, figure, form in shown.figures
                           for name in names),
                  *(_text(group.ratio(over, name), "{:.2f}x") for over, name in shown.ratios)]
                 for group, case in zip(found, columns, strict=True)]
        headers += [f"{name}: {title}" for title, _, _ in shown.figures for name in names]
        headers += [f"{name} over {over}" for over, name in shown.ratios]
    else:
        overs = list(dict.fromkeys(over for over, _ in shown.ratios))
        lines = [[*case, name, *(_text(group.figure(name, figure), form) for _, figure, form in shown.figures),
                  *(_text(group.ratio(over, name), "{:.2f}x") for over in overs)]
                 for group, case in zip(found, columns, strict=True) for name in names if name in group.rows]
        headers += ["contender", *(title for title, _, _ in shown.figures), *(f"over {over}" for over in overs)]
    return markdown(lines, headers)


def texts(shown: Shown, result: dict) -> list[str]:
    """The tables of a prepared result in Markdown."""
    case = groups(result)[0].case
    keys = varying(result)
    same = described(case, [key for key in case if key not in keys and key not in DERIVED])
    return list(filter(None, [measures_table(shown, result), failures_table(result),
                              same and f"All cases: {same}.", shown.note, main_table(shown, result),
                              "\n".join(shown.sentences(result))]))


# ---- bars ---------------------------------------------------------------------------------------------------------


def missed(shown: Shown, result: dict) -> list[str]:
    """One line for each bar that this prepared result does not reach."""
    found = []
    for measure in shown.measures:
        for least, where in measure.bars:
            values = [value for value in measure.values(result) if where.items() <= value.case.items()]
            if values and (values[0].value - least) * (1 if measure.better == SMALLER else -1) > 0:
                place = measure.place(values[0], varying(result)) or "its only case"
                found.append(f"{shown.benchmark}: {measure.what} is {values[0].value:.4g} ({place}); the bar is "
                             f"{least:g}")
    return found


# ---- plots --------------------------------------------------------------------------------------------------------


def lines(pyplot, panels: dict[str, dict[str, list]], xlabel: str, ylabel: str, **settings) -> None:
    """Panels with one line for each series of points: {title: {series: [(x, y), ...]}}.

    Series of one color in a panel, which are a contender's, have lines of different styles. Values that are all
    positive have an axis from zero, unless it is logarithmic.

    Args:
        settings: of each axis.
    """
    from matplotlib.ticker import LogLocator, NullFormatter
    names = dict.fromkeys(name for series in panels.values() for name in series)
    of = colors(names)
    style = {name: STYLES[[other for other in names if of[other] == of[name]].index(name) % len(STYLES)]
             for name in names}
    for axis, (title, series) in zip(_axes(pyplot, len(panels), 2.7), panels.items(), strict=True):
        for name, points in series.items():
            x, y = zip(*sorted(points), strict=True)
            axis.plot(x, y, style[name], color=of[name], linewidth=1.4)
            axis.plot(x, y, ".", color=of[name], markersize=5)
        values = [point[1] for points in series.values() for point in points]
        if settings.get("yscale") != "log" and min(values, default=-1) >= 0:
            axis.set_ylim(0, 1.05 * max(values))
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
        for scale, one in (("xscale", axis.xaxis), ("yscale", axis.yaxis)):
            if settings.get(scale) == "log":  # plain numbers in place of powers of ten
                one.set_major_locator(LogLocator(subs=(1, 2, 5)))
                one.set_major_formatter("{x:g}")
                one.set_minor_formatter(NullFormatter())
    _legend(pyplot, [pyplot.Line2D([], [], color=of[name], linestyle=style[name], label=name) for name in names])


def spans(pyplot, panels: dict[str, dict[str, list[float]]], xlabel: str) -> None:
    """A forest plot: panels with a row for each contender, with its values as ticks, their number, and their mean with
    its 95 % interval. All panels have the same scale, with zero in the middle."""
    of = colors(name for rows in panels.values() for name in rows)
    tallest = max((len(rows) for rows in panels.values()), default=1)
    farthest = max((abs(value) for rows in panels.values() for values in rows.values()
                    for value in (*values, *(end for end in interval(values)[1:3] if end is not None))), default=1)
    end = 1.05 * farthest
    for axis, (title, rows) in zip(_axes(pyplot, len(panels), 0.8 + 0.3 * tallest), panels.items(), strict=True):
        for y, (name, values) in enumerate(rows.items()):
            mean = interval(values)
            axis.plot(values, [y] * len(values), "|", color=of[name], markersize=7, alpha=0.6)
            axis.plot([mean.mean], [y], "o", color=of[name], markersize=6)
            if mean.low is not None:
                axis.plot([mean.low, mean.high], [y] * 2, color=of[name], linewidth=2)
        axis.set_yticks(range(len(rows)), [f"{name} (n = {len(values)})" for name, values in rows.items()])
        axis.axvline(0, color=GRAY, linewidth=0.8)
        axis.set(title=title, xlabel=xlabel, xlim=(-end, end), ylim=(max(1, len(rows)) - 0.5, -0.5))


def dots(pyplot, panels: dict[str, dict[str, dict[str, float]]], xlabel: str, bound: str | None = None) -> None:
    """Panels with a row for each case and a dot in it for each contender: {title: {case: {contender: value}}}. The
    axis begins at zero. `bound`: the contender that none can pass, drawn as a line across its row."""
    of = colors(name for rows in panels.values() for row in rows.values() for name in row if name != bound)
    tallest = max((len(rows) for rows in panels.values()), default=1)
    axes = _axes(pyplot, len(panels), 0.8 + 0.24 * tallest)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        for y, row in enumerate(rows.values()):
            for name, value in row.items():
                if name == bound:
                    axis.plot([value], [y], "|", color="black", markersize=13, markeredgewidth=1.6)
                else:
                    axis.plot([value], [y], "o", color=of[name], markersize=6)
        axis.set_yticks(range(len(rows)), list(rows))
        axis.grid(axis="y", color=GRAY, alpha=0.2)
        axis.set(title=title, xlabel=xlabel, ylim=(len(rows) - 0.5, -0.5))
        axis.set_xlim(left=0)
    handles = [pyplot.Line2D([], [], color=color, marker="o", linestyle="", label=name) for name, color in of.items()]
    if bound:
        handles.append(pyplot.Line2D([], [], color="black", marker="|", markersize=11, markeredgewidth=1.6,
                                     linestyle="", label=bound))
    _legend(pyplot, handles)


def stacked(pyplot, panels: dict[str, dict[str, dict[str, float]]], xlabel: str,
            part_colors: Mapping[str, str] = MappingProxyType({})) -> None:
    """Panels with one bar for each label, made of parts: {title: {label: {part: length}}}.

    A contender's bar has its color, and its parts are tints of it. Other bars have the color of their part.

    Args:
        part_colors: the colors of parts, the same in all bars.
    """
    parts_of = [list(dict.fromkeys(part for bar in bars.values() for part in bar)) for bars in panels.values()]
    of_labels = colors(label for panel in panels.values() for label in panel)
    tallest = max((len(panel) for panel in panels.values()), default=1)
    axes = _axes(pyplot, len(panels), 0.8 + 0.24 * tallest)
    for axis, (title, bars), parts in zip(axes, panels.items(), parts_of, strict=True):
        for label, bar in bars.items():
            left = 0.0
            for i, part in enumerate(parts):
                color = part_colors.get(part) or color_of(part) or tint(of_labels[label], i)
                axis.barh([label], [bar.get(part) or 0], left=left, color=color)
                left += bar.get(part) or 0
        axis.set(xlabel=xlabel)
        axis.set_title(textwrap.fill(title, 56), loc="right")  # beginning above the labels
        axis.margins(y=0.02)
        axis.invert_yaxis()
    names = [" or ".join(filter(None, dict.fromkeys(same))) for same in zip_longest(*parts_of)]
    if len(names) > 1:
        _legend(pyplot, [pyplot.Rectangle((0, 0), 1, 1, color=part_colors.get(name) or tint(GRAY, i), label=name)
                         for i, name in enumerate(names)])


def _legend(pyplot, handles: list) -> None:
    """One for all panels, above them."""
    if handles:
        pyplot.gcf().legend(handles=handles, loc="outside upper center", ncols=min(3, len(handles)), frameon=False)


def points_over(result: dict, x: str, keys: tuple[str, ...], contenders: Iterable[str], series_key: str = "",
                figure: str = "median_ms", over: str | None = None, when: Callable[[dict], bool] = lambda case: True,
                title: str = "") -> dict[str, dict[str, list]]:
    """Panels for `lines`: one for each combination of the `keys`, a figure over the case's `x`.

    Args:
        series_key: a key of cases that get lines of their own.
        over: a contender; shows each figure over its figure.
    """
    panels: dict = {}
    for group in groups(result):
        if when(group.case):
            panel = panels.setdefault(f"{title}{described(group.case, keys)}", {})
            for name in contenders:
                value = group.ratio(name, over, figure) if over else group.figure(name, figure)
                if value is not None:
                    series = f"{name}, {group.case[series_key]}" if series_key else name
                    panel.setdefault(series, []).append((group.case[x], value))
    return panels


def parts_of_cases(result: dict, parts: tuple[str, ...]) -> dict[str, dict[str, dict[str, float]]]:
    """Panels for `stacked`: one a case, with the ms of each contender's operations `parts`."""
    keys = [key for key in varying(result) if key != "operation"]
    panels: dict = {}
    for group in groups(result, *parts):
        panel = panels.setdefault(described(group.case, keys), {})
        for name in group.rows:
            panel.setdefault(name, {})[group.case["operation"]] = group.figure(name)
    return panels


def _axes(pyplot, count: int, height: float) -> list:
    columns = max(1, min(2, count))
    rows = max(1, -(-count // columns))
    _, axes = pyplot.subplots(rows, columns, figsize=(WIDTH, height * rows + 0.5), squeeze=False,
                              layout="constrained")
    for axis in axes.flat[count:]:
        axis.axis("off")
    return list(axes.flat[:count])


def draw(plot: Callable[[dict, Any], None], path: Path, result: dict) -> None:
    """Draws a plot of a prepared result, as wide as a page. `path`: of the result file, or of the plot."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    with pyplot.rc_context(STYLE):
        plot(result, pyplot)
        pyplot.savefig(path.with_suffix(".png"), dpi=100)
        pyplot.close()


def plots_of(shown: Shown, path: Path, result: dict) -> dict[Path, Callable[[dict, Any], None]]:
    """The plots of a prepared result by their files, in the order of its page."""
    more = {path.with_name(f"{path.stem}_{name}.png"): plot for name, plot in shown.more_plots(result).items()}
    return {path.with_suffix(".png"): shown.plot, **more}


def draw_all(shown: Shown, path: Path, result: dict) -> None:
    for file, plot in plots_of(shown, path, result).items():
        draw(plot, file, result)


# ---- one result file ----------------------------------------------------------------------------------------------


def origin(result: dict) -> str:
    """Machine, date and commit, or those of a file filled in pieces. A "+" behind one: tracked files differed."""
    commits = [f"{one[:10]}{'+' * one.endswith('+')}" for one in (result["commit"] or "unknown").split(", ")]
    return f"{result['machine']}, {result['date'][:10]}, commit {', '.join(commits)}"


def show(shown: Shown, path: Path, check: bool = False) -> str:
    """Prints the tables of a result file and draws its plot beside it.

    Args:
        check: also compares with the bars, and prints a line for each that is not reached.

    Returns:
        What is wrong with the result, in one line; "" if nothing is.
    """
    result = results_file.read(path, shown.benchmark)
    if not result["rows"]:
        return f"{path} has no rows: there was no time for any case"
    prepared = shown.prepared(result)
    draw_all(shown, path, prepared)
    print("\n\n".join([f"{path}: {origin(result)}; plot: {path.with_suffix('.png')}", *texts(shown, prepared)]))
    bars = missed(shown, prepared) if check else []
    for line in bars:
        print(line, file=sys.stderr)
    if not all(row["correct"] for row in result["rows"]):
        return "some results were wrong"
    return f"bars not reached: {len(bars)}" if bars else ""
