"""The screens of `pgque top`: all queues, one queue, what is wrong, and a question. They need Textual."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeAlias

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Static

from ..cli.common import visible
from ..cli.health import advice
from ..errors import PgqueError, one_line
from ..ops.overview import Figures, Row
from ..ops.titles import KINDS
from ..ops.units import NOTHING, number, readable, span
from .columns import COLUMNS, LEAST, Column, cells, count, fitting, ordered
from .state import State, plural

MOST_SHOWN = 500  # queues in the table
MOST_PROBLEMS = 5  # lines above the table
MOST_OF_NAME = 24  # characters of a queue's name in a problem, so that the figures behind it have room
SCROLLBAR = 2  # characters

# A row as a table shows it: its key, and the texts.
_Row: TypeAlias = Callable[[Row], tuple[str, list[str]]]

COLOURS = {"fail": "bold red", "warn": "yellow", "paused": "cyan"}


def cut(text: str, width: int) -> str:
    """Return a text in one line of at most `width` characters."""
    line = Text(visible(text), no_wrap=True)
    line.truncate(max(width, 1), overflow="ellipsis")
    return line.plain


def problem(row: Row, width: int, with_queue: bool = True) -> Text:
    """Return a failed check as one line of at most `width` characters."""
    where = f"{cut(row['queue'], MOST_OF_NAME)}: " if with_queue and row["queue"] is not None else ""
    line = Text().append(row["status"].upper(), COLOURS[row["status"]])
    line.append(f" {where}{row['check_name']}: {readable(visible(row['detail'] or ''))}")
    line.truncate(width, overflow="ellipsis")
    return line


class Grid(DataTable[Text]):
    """A table that is filled again and again. The cursor stays on its row, by the row's key."""

    def __init__(self, columns: Sequence[Column], id: str) -> None:
        super().__init__(id=id, cursor_type="row", cell_padding=0)
        self._wanted = columns
        self._kept: list[int] = []
        self._layout: list[tuple[str, int]] = []
        self.keys: list[str] = []

    @property
    def chosen(self) -> str | None:
        """The key of the row with the cursor."""
        return self.keys[self.cursor_row] if 0 <= self.cursor_row < len(self.keys) else None

    def fill(self, rows: Iterable[tuple[str, Sequence[str]]], sorted_by: str = "") -> None:
        """Show rows, each with its key. `sorted_by` is v or ^ and the column whose title gets this mark."""
        found, chosen = list(rows), self.chosen
        self._lay_out(sorted_by)
        while self.row_count > len(found):
            self.remove_row(self.coordinate_to_cell_key(Coordinate(self.row_count - 1, 0)).row_key)
        for row, (_, texts) in enumerate(found):
            new = [
                self._cell(self._wanted[at], width, texts[at])
                for at, (_, width) in zip(self._kept, self._layout, strict=True)
            ]
            if row == self.row_count:
                self.add_row(*new)
                continue
            for column, cell in enumerate(new):
                place = Coordinate(row, column)
                if self.get_cell_at(place) != cell:
                    self.update_cell_at(place, cell)
        self.keys = [key for key, _ in found]
        if chosen in self.keys and self.keys.index(chosen) != self.cursor_row:
            self.move_cursor(row=self.keys.index(chosen))

    def _lay_out(self, sorted_by: str) -> None:
        room = self.app.size.width - SCROLLBAR
        kept = fitting(self._wanted, room)
        columns = [self._wanted[at] for at in kept]
        fixed = sum(column.width for column in columns)
        flexible = sum(column.width == 0 for column in columns)
        left = max((room - fixed) // max(flexible, 1), LEAST)
        mark = {f"v{column.name}": "▼" for column in columns}
        mark |= {f"^{column.name}": "▲" for column in columns}
        layout = [
            (column.title + (mark[sorted_by] if sorted_by[1:] == column.name else ""), column.width or left)
            for column in columns
        ]
        if layout == self._layout:
            return
        self.clear(columns=True)
        self._kept, self._layout = kept, layout
        for column, (title, width) in zip(columns, layout, strict=True):
            text = title.rjust(width) if column.right else title
            self.add_column(Text(text), width=width, key=column.name)

    @staticmethod
    def _cell(column: Column, width: int, text: str) -> Text:
        return Text(column.shown(visible(text), width), COLOURS.get(text, ""), no_wrap=True)


class QueueGrid(Grid):
    """The table of queues: Enter opens one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Open")]


class Frame(Screen[None]):
    """A screen with the time, the place and a line for what was done. `show` fills it again."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state
        self._offered = (state.source.writable, False)

    def on_mount(self) -> None:
        """Fill the screen."""
        self.show()

    def on_resize(self) -> None:
        """Fill the screen in its new size."""
        self.call_after_refresh(self.show)

    def show(self) -> None:
        """Fill the screen with the last answers."""
        raise NotImplementedError

    def show_frame(self, left: str, status: str = "") -> None:
        """Fill the first and the last line."""
        source, width = self.state.source, self.app.size.width
        self.offer()
        right = "" if self.state.taken is None else f"{self.state.taken:%H:%M:%S}"
        if not source.writable:
            right = f"read only  {right}"
        left = cut(left, width - len(right) - 1)
        self.query_one("#title", Static).update(Text(left.ljust(width - len(right)) + right, no_wrap=True))
        text, failed = self.state.status()
        line = self.query_one("#status", Static)
        line.set_class(failed, "failed")
        line.update(Text(visible(text or status)))

    def offer(self) -> None:
        """Show the keys anew where others are offered now: for another queue, or on a promoted standby."""
        queue = self.chosen_queue()
        offered = (self.state.source.writable, queue is not None and queue.paused)
        if offered != self._offered:
            self._offered = offered
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer no change where nothing can be changed; of pause and resume, offer what changes something."""
        if action in ("pause", "resume"):
            queue = self.chosen_queue()
            if (queue is not None and queue.paused) != (action == "resume"):
                return False
        return self.state.source.writable or action not in (
            "pause",
            "resume",
            "reclaim",
            "requeue",
            "requeue_all",
        )

    def action_pause(self) -> None:
        """Pause the queue with the cursor, or the one that is open."""
        queue = self.chosen_queue()
        if queue is not None:
            self.app.run_worker(self._pause(queue))

    def action_resume(self) -> None:
        """Resume that queue."""
        self.action_pause()

    async def _pause(self, queue: Figures) -> None:
        name, paused = queue.name, not queue.paused
        question = (
            f"Pause queue {name}? Senders are refused until it is resumed. Consumers still receive."
            if paused
            else f"Resume queue {name}? It is paused. Senders can send again."
        )
        if await self.app.push_screen_wait(Question(question)):
            await self.state.pause(name, paused)

    def chosen_queue(self) -> Figures | None:
        """Return the queue that keys are for."""
        return None

    def action_problems(self) -> None:
        """Show what is wrong in full."""
        self.app.push_screen(Problems(self.state))


class Queues(Frame):
    """The overview: what is wrong, and all queues."""

    BINDINGS: ClassVar[list[BindingType]] = [
        # With priority, so that the next key is for the filter, however fast it follows.
        Binding("slash", "filter", "Filter", key_display="/", priority=True),
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", "Sort by the column before", show=False),
        Binding("r", "reverse", "Reverse"),
        Binding("p", "pause", "Pause"),
        Binding("p", "resume", "Resume"),
        Binding("exclamation_mark", "problems", "Problems", key_display="!"),
        Binding("escape", "all", "Show all", show=False),
    ]

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._sorted_by = COLUMNS[0].name
        self._backwards = False
        self._filter = ""

    def compose(self) -> ComposeResult:
        """Make the parts of the screen."""
        yield Static(id="title")
        yield Static(id="problems")
        yield QueueGrid(COLUMNS, "queues")
        yield Input(placeholder="a part of a queue's name", id="filter", compact=True)
        yield Static(id="status")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Fill the screen, with the cursor in the table."""
        self.query_one("#filter").display = False
        self.query_one(QueueGrid).focus()
        self.show()

    def show(self) -> None:
        """Fill the screen with the last answers."""
        overview = self.state.overview
        found = [q for q in overview.queues.values() if self._filter.lower() in q.name.lower()]
        shown = ordered(found, self._sorted_by, self._backwards)[:MOST_SHOWN]
        some = f" with {self._filter!r} in the name" if self._filter else ""
        more = f"; the first {MOST_SHOWN} are shown" if len(found) > MOST_SHOWN else ""
        source = self.state.source
        self.show_frame(
            f"pgque top  {source.place} as {source.role.get('name', '')}",
            f"{plural(len(found), 'queue')}{some}{more}" if self.state.taken else "reading …",
        )
        self.query_one("#problems", Static).update(self._problems())
        mark = ("v", "^")[self._backwards != (self._sorted_by == "name")]
        self.query_one(QueueGrid).fill(((q.name, cells(q)) for q in shown), mark + self._sorted_by)
        self.offer()

    def _problems(self) -> Text:
        overview = self.state.overview
        if not overview.problems:
            own = "" if self.state.source.role.get("reader") else " with your queues"
            return Text(f"All is well{own}." if self.state.taken else "", "green")
        most = MOST_PROBLEMS if len(overview.problems) <= MOST_PROBLEMS else MOST_PROBLEMS - 1
        lines = [problem(row, self.app.size.width) for row in overview.problems[:most]]
        if len(overview.problems) > most:
            lines.append(Text(f"and {number(len(overview.problems) - most)} more: press !", "dim"))
        return Text("\n").join(lines)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer no filter where one is typed: a slash is a letter of it."""
        if action == "filter" and isinstance(self.focused, Input):
            return False
        return super().check_action(action, parameters)

    def chosen_queue(self) -> Figures | None:
        """Return the queue with the cursor."""
        grids = list(self.query(QueueGrid))  # none before the screen is filled
        return self.state.overview.queues.get(grids[0].chosen or "") if grids else None

    def on_data_table_row_highlighted(self) -> None:
        """Offer what can be done with the queue that has the cursor now."""
        self.offer()

    def on_data_table_row_selected(self) -> None:
        """Open the queue with the cursor."""
        queue = self.chosen_queue()
        if queue is not None:
            self.state.open(queue.name)
            self.app.push_screen(Queue(self.state))

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by a column that was clicked at, or the other way round."""
        name = str(event.column_key.value)
        self._sort(name, name == self._sorted_by and not self._backwards)

    def action_sort(self, step: int) -> None:
        """Sort by the next column, or the one before."""
        names = [column.name for column in COLUMNS]
        self._sort(names[(names.index(self._sorted_by) + step) % len(names)], False)

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self._sort(self._sorted_by, not self._backwards)

    def _sort(self, column: str, backwards: bool) -> None:
        self._sorted_by, self._backwards = column, backwards
        self.show()
        self.query_one(QueueGrid).move_cursor(row=0)

    def action_filter(self) -> None:
        """Ask for a part of a name."""
        line = self.query_one("#filter", Input)
        line.display = True
        self.set_focus(line)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the queues that match what was typed so far."""
        self._filter = event.value
        self.show()

    def on_input_submitted(self) -> None:
        """Keep the filter, and go back to the table."""
        self.query_one("#filter").display = False
        self.set_focus(self.query_one(QueueGrid))

    def action_all(self) -> None:
        """Show all queues again."""
        self.query_one("#filter", Input).value = ""
        self.on_input_submitted()


CONSUMERS = (
    Column("lag", "Oldest", 11),
    Column("pending", "Pending", 10),
    Column("seen", "Last seen", 11, rank=2),
    Column("consumer", "  Consumer", right=False),
    Column("batch", " Batch", 7, right=False, rank=3),
    Column("role", " Kind", 19, right=False, rank=1),
)
WORKERS = (
    Column("messages", "Messages", 9),
    Column("batches", "Batches", 9, rank=2),
    Column("since", "Since", 11, rank=1),
    Column("lease", "Lease expires in", 17),
    Column("worker", "  Worker", right=False),
    Column("consumer", "  Consumer", right=False),
)
REASONS = (
    Column("count", "Dead", 9),
    Column("age", "Newest", 11),
    Column("reason", "  Reason", right=False),
    Column("consumers", "  Consumer", 18, right=False, rank=1),
)


class Queue(Frame):
    """One queue: its consumers, workers and dead letters."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Back"),
        Binding("tab", "app.focus_next", "Next"),
        Binding("p", "pause", "Pause"),
        Binding("p", "resume", "Resume"),
        Binding("c", "reclaim", "Reclaim"),
        Binding("u", "requeue", "Requeue"),
        Binding("U", "requeue_all", "Requeue all"),
        Binding("exclamation_mark", "problems", "Problems", show=False),
    ]

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.queue = state.queue or ""
        self._holders: dict[str, str] = {}  # keys of workers, and the consumers they work for

    def compose(self) -> ComposeResult:
        """Make the parts of the screen."""
        yield Static(id="title")
        yield Static(id="problems")
        with VerticalScroll(can_focus=False):
            yield Static("Consumers", id="of_consumers", classes="heading")
            yield Grid(CONSUMERS, "consumers")
            yield Static("Workers with messages", id="of_workers", classes="heading")
            yield Grid(WORKERS, "workers")
            yield Static("Dead letters by reason", id="of_reasons", classes="heading")
            yield Grid(REASONS, "reasons")
        yield Static(id="status")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Fill the screen, with the cursor in the first table."""
        self.query_one("#consumers").focus()
        self.show()

    def show(self) -> None:
        """Fill the screen with the last answers."""
        figures, opened = self.state.figures, self.state.opened
        self.show_frame(f"Queue {self.queue}", "" if opened else "reading …")
        self.query_one("#problems", Static).update(self._summary(figures))
        if opened is None or opened.queue != self.queue:
            return
        self._table("consumers", "Consumers", opened.consumers, _consumer)
        self._table("workers", "Workers with messages", opened.workers, _worker)
        self._table("reasons", "Dead letters by reason", opened.reasons, _reason)
        if not isinstance(opened.workers, PgqueError):
            self._holders = {_worker(row)[0]: row["consumer"] for row in opened.workers}

    def _summary(self, queue: Figures | None) -> Text:
        if queue is None:
            return Text("There is no queue of this name now." if self.state.taken else "", "red")
        facts = [
            "paused" if queue.paused else "",
            f"{count(queue.dead)} dead",
            f"{count(queue.retries)} retries",
            f"{count(queue.backlog)} backlog",
            f"oldest {span(queue.oldest)}",
            f"in {count(queue.rate)}/s",
            f"out {count(queue.out)}/s",
        ]
        width = self.app.size.width
        lines = [Text(", ".join(fact for fact in facts if fact))]
        lines += [problem(row, width, with_queue=False) for row in queue.problems[:MOST_PROBLEMS]]
        return Text("\n").join(lines)

    def _table(self, name: str, title: str, found: list[Row] | PgqueError, row: _Row) -> None:
        heading, grid = self.query_one(f"#of_{name}", Static), self.query_one(f"#{name}", Grid)
        grid.display = bool(found) and not isinstance(found, PgqueError)
        if isinstance(found, PgqueError):
            heading.update(Text(f"{title}: {visible(one_line(found))}"))
            return
        heading.update(Text(title if found else f"{title}: none"))
        # Not auto: of a table that grows just as the screen is laid out, Textual keeps the height it had.
        grid.styles.height = len(found) + 1
        grid.fill(map(row, found))

    def chosen_queue(self) -> Figures | None:
        """Return the queue that is open."""
        return self.state.figures

    def action_close(self) -> None:
        """Go back to all queues."""
        self.state.open(None)
        self.dismiss()

    def action_reclaim(self) -> None:
        """Release what the workers of a consumer hold: of the row with the cursor."""
        consumers, workers = self.query_one("#consumers", Grid), self.query_one("#workers", Grid)
        consumer = self._holders.get(workers.chosen or "") if workers.has_focus else consumers.chosen
        if consumer is None:
            self.state.say("There is no consumer to reclaim from.", failed=True)
            return
        self.app.run_worker(self._reclaim(consumer))

    async def _reclaim(self, consumer: str) -> None:
        opened = self.state.opened
        held = [] if opened is None or isinstance(opened.workers, PgqueError) else opened.workers
        mine = [row for row in held if row["consumer"] == consumer]
        if not mine:
            self.state.say(f"No worker of consumer {consumer} has leased messages.", failed=True)
            return
        batches, messages = sum(row["batches"] for row in mine), sum(row["messages"] for row in mine)
        if await self.app.push_screen_wait(
            Question(
                f"Release {plural(batches, 'batch', 'batches')} with {plural(messages, 'message')}, leased by"
                f" {plural(len(mine), 'worker')} of consumer {consumer}? The messages are redelivered."
            )
        ):
            await self.state.reclaim(self.queue, consumer)

    def action_requeue(self) -> None:
        """Requeue the dead letters with one reason: of the row with the cursor."""
        reason = self.query_one("#reasons", Grid).chosen
        if reason is None:
            self.state.say("There is no dead letter to requeue.", failed=True)
            return
        self.app.run_worker(self._requeue(reason))

    def action_requeue_all(self) -> None:
        """Requeue all dead letters of the queue."""
        self.app.run_worker(self._requeue(None))

    async def _requeue(self, reason: str | None) -> None:
        try:
            reasons = await self.state.source.reasons(self.queue)
        except PgqueError as error:
            self.state.say(one_line(error), failed=True)
            return
        dead = sum(row["count"] for row in reasons if reason in (None, row["reason"]))
        if not dead:
            self.state.say("There is no dead letter to requeue.", failed=True)
            return
        why = "" if reason is None else f" with the reason “{reason or NOTHING}”"
        if await self.app.push_screen_wait(
            Question(
                f"Requeue {plural(dead, 'dead letter')} of queue {self.queue}{why}?"
                " They are redelivered to the consumers that failed them."
            )
        ):
            await self.state.requeue(self.queue, dead, reason)


def _consumer(row: Row) -> tuple[str, list[str]]:
    name: str = row["consumer_name"]
    return name, [
        span(row["lag"]),
        count(row["pending_events"]),
        span(row["last_seen"]),
        name,
        "open" if row["open_batch"] else "",
        KINDS.get(row["role"], row["role"] or ""),
    ]


def _worker(row: Row) -> tuple[str, list[str]]:
    return f"{row['consumer']}\0{row['worker']}", [
        count(row["messages"]),
        count(row["batches"]),
        span(row["last_seen"]),
        span(row["lease_left"]),
        row["worker"],
        row["consumer"],
    ]


def _reason(row: Row) -> tuple[str, list[str]]:
    return row["reason"], [
        count(row["count"]),
        span(row["age"]),
        row["reason"] or NOTHING,
        row["consumers"],
    ]


class Problems(Frame):
    """The screen of all problems, with the advice for each."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Back")]

    def compose(self) -> ComposeResult:
        """Make the parts of the screen."""
        yield Static(id="title")
        with VerticalScroll():
            yield Static(id="all")
        yield Static(id="status")
        yield Footer(show_command_palette=False)

    def show(self) -> None:
        """Fill the screen with the last answers."""
        self.show_frame("What is wrong, and what to do")
        text = Text()
        for row in self.state.overview.problems:
            where = f"queue {visible(row['queue'])}, " if row["queue"] is not None else ""
            text.append(row["status"].upper(), COLOURS[row["status"]])
            text.append(f" {where}{row['check_name']}\n     {readable(visible(row['detail'] or ''))}\n")
            for piece, command in advice(row["advice"]):
                text.append(f"     {'$ ' if command else ''}{visible(piece)}\n", "bold" if command else "")
        self.query_one("#all", Static).update(text if text else Text("All is well.", "green"))


class Question(ModalScreen[bool]):
    """A question that is answered with y or n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Make the box."""
        yield Static(Text(f"{visible(self._question)}\n\ny  yes     n  no"), id="question")

    def action_answer(self, answer: bool) -> None:
        """Close the box with the answer."""
        self.dismiss(answer)
