"""One rank after the other takes rows, until its tokens and its work are its share."""

from __future__ import annotations

from collections import Counter

from flexcp.layout.balance.row_groups import RowGroup, Unit

_CLOSE = 200
"""Work that is off by less than this fraction of a rank's is left alone."""
_TOLERANCE = 4096
"""Cuts fall on rounder numbers as long as that costs less than this fraction of the mean work."""

Taken = tuple[RowGroup, Unit]
"""Rows, and where they are from."""


class Filling:
    """What is left to deal out, and the rank that is being filled.

    Args:
        groups: All rows.
        whole: Groups that one rank may take as they are.
        sharp: Whether a part of a group is taken to need what its last row sees; or all of it.
        level: Whether light rows go to those who need most; or equally to all who share a group.
    """

    def __init__(
        self, groups: list[RowGroup], whole: list[RowGroup], *, sharp: bool, level: bool
    ) -> None:
        self._sharp, self._level = sharp, level
        by_size = sorted(groups, key=lambda g: g.largest_document)
        self._most = by_size[-1].largest_document
        self._heavy = [g for g in by_size if g.heavy]
        self._light = [g for g in by_size if g.light]
        self._whole = sorted(whole, key=lambda g: -g.largest_document)
        small = [unit for g in self._light if g.small for unit in g.light]
        self._cheap = sum(u.area for u in small) / max(1, sum(u.tokens for u in small))
        """Work per row of what fills up."""
        self._current: RowGroup | None = None
        """The group whose heavy rows are dealt out."""
        self._source: RowGroup | None = None
        """The group whose light rows are dealt out."""
        self._light_needed_rows = {
            g.number: g.light_needed_rows if sharp else g.largest_document for g in groups
        }
        self._lights: Counter[int] = Counter()
        """How many light units this rank has of each group."""
        self._heavies: dict[int, int] = {}
        """Rows that are needed for the heavy units that this rank has of each group."""
        self._quota = 0
        """How many light rows of the current group this rank may still have."""
        self._last_light: Taken | None = None
        """What this rank took last."""

    def fill(self, tokens: int, area: int, least: int) -> list[Taken]:
        """Takes rows for one rank: work of `area`, or `least` if more would need too many rows."""
        self._lights, self._heavies, self._source = Counter(), {}, None
        self._last_light = None
        opened = self._open()
        if opened.heavy:
            self._heavies[opened.number] = self._needs(opened)  # light rows go with these
        own = self._take_whole(opened, tokens, area) if opened.heavy else []
        have, work = _tokens(own), _area(own)
        self._quota = self._wish(opened, area - work)
        light: list[Taken] = []
        while have < tokens and (group := self._light_group()) is not None:
            light.append((group, self._take_light(group, tokens - have)))
            have, work = have + light[-1][1].tokens, work + light[-1][1].area
        while have < tokens:
            own.append(self._take_heavy(tokens - have))
            have, work = have + own[-1][1].tokens, work + own[-1][1].area
        while work < area and light:
            if not self._open_fits() and (work >= least or not self._open().heavy):
                break
            change = self._swap(own, light, area - work, area)
            if change is None:
                break
            work += change
        self._last_light = light[-1] if light else None
        return own + light

    def adjust(self, own: list[Taken], area: int, limits: tuple[int, int]) -> list[Taken]:
        """Takes or gives back a few light rows where rows are too heavy to get closer.

        Only the last rows that were taken can be given back, and only if their group is known.
        """
        have, work = _tokens(own), _area(own)
        if abs(area - work) * _CLOSE <= area or not self._last_light:
            return own
        group, last = self._last_light
        wish = round((area - work) * last.tokens / last.area) if last.area else 0
        tokens = max(limits[0], min(limits[1], have + wish)) - have
        if tokens < 0:
            back = last.take(min(-tokens, last.tokens - 1), from_end=True)
            if back.tokens:
                self._give_back(group, back)
        while tokens > 0 and (source := self._light_group()) is not None:
            unit = self._take_light(source, tokens)
            own.append((source, unit))
            tokens -= unit.tokens
        return own

    def _take_whole(self, opened: RowGroup, tokens: int, area: int) -> list[Taken]:
        """Whole groups, as long as the current one's rows and others can make up the rest."""
        dear = opened.heavy[0].area / opened.heavy[0].tokens
        cheap = self._cheap
        own: list[Taken] = []
        have = work = 0
        rest: list[RowGroup] = []
        for group in self._whole:
            if group.begun or group is opened:
                continue
            room = tokens - have - group.tokens
            missing = area - work - group.area - cheap * room
            if 0 <= missing <= (dear - cheap) * room:
                own.extend((group, unit) for unit in (*group.heavy, *group.light))
                have, work = have + group.tokens, work + group.area
                self._empty(group)
            else:
                rest.append(group)
        self._whole = rest
        return own

    def _empty(self, group: RowGroup) -> None:
        group.heavy.clear()
        group.light.clear()
        group.begun = True

    def _give_back_tokens(self, light: list[Taken], tokens: int) -> int:
        """Gives back the light rows that were taken last; returns their work."""
        work = 0
        while tokens:
            source, given = light[-1]
            back = given.take(min(tokens, given.tokens), from_end=True)
            self._give_back(source, back)
            work, tokens = work + back.area, tokens - back.tokens
            if given.tokens == 0:
                light.pop()
                self._lights[source.number] -= 1
        return work

    def _give_back(self, group: RowGroup, unit: Unit) -> None:
        if not group.light:
            self._light = sorted([*self._light, group], key=lambda g: g.largest_document)
        group.light.appendleft(unit)

    def _swap(self, own: list[Taken], light: list[Taken], missing: int, share: int) -> int | None:
        """Gives light rows back for heavy ones; returns by how much the work grows."""
        group = self._open()
        if not group.heavy:
            return None
        _, given = light[-1]
        dear = group.heavy[0]
        tokens = min(given.tokens, dear.tokens)
        gain = dear.area / dear.tokens - given.area / given.tokens
        if gain > 0 and missing / gain < tokens:
            tokens = _rounded(missing / gain, share / _TOLERANCE / gain, tokens)
            if tokens == 0:
                return None
        back = self._give_back_tokens(light, tokens)
        own.append(self._take_heavy(tokens))
        return own[-1][1].area - back

    def _needs(self, group: RowGroup) -> int:
        """Rows of a group that a rank needs to have its next heavy rows."""
        return group.heavy[0].needed_rows if self._sharp else group.largest_document

    def _room(self) -> int:
        """How many more rows this rank may need until it needs as many as the largest group has."""
        needed = dict(self._heavies)
        for number, units in self._lights.items():
            if units:
                needed[number] = max(needed.get(number, 0), self._light_needed_rows[number])
        return self._most - sum(needed.values())

    def _open_fits(self) -> bool:
        """Whether the next heavy rows are of the same group, or of one that needs little."""
        if self._current is not None and self._current.heavy:
            return True
        group, fits = self._next()
        return fits and bool(group.heavy)

    def _open(self) -> RowGroup:
        """The group whose heavy rows are next; one without any if there are none."""
        if self._current is None or not self._current.heavy:
            self._current, _ = self._next()
        return self._current

    def _next(self) -> tuple[RowGroup, bool]:
        """The group to go on with, and whether it fits this rank."""
        self._heavy = [g for g in self._heavy if g.heavy]
        whole = {g.number for g in self._whole}
        parted = [g for g in self._heavy if g.number not in whole] or self._heavy
        room = self._room()
        fits = [g for g in parted if self._needs(g) <= room]
        if fits:
            return fits[-1], True
        return min(parted, key=self._needs, default=_NOTHING), False

    def _wish(self, group: RowGroup, missing: int) -> int:
        """How many light rows of the group in which it works a rank should have."""
        if not group.heavy or not self._level:
            return group.equal if group.heavy else 0
        dear = group.heavy[0]
        own = min(dear.needed_rows, missing * dear.tokens // max(1, dear.area))
        return max(0, min(group.most, dear.needed_rows - own - group.level))

    def _take_heavy(self, tokens: int) -> Taken:
        group = self._open()
        assert group.heavy, "there are fewer rows than the ranks were promised"
        group.begun = True
        number, unit = group.number, group.heavy[0]
        self._heavies[number] = max(self._heavies.get(number, 0), self._needs(group))
        unit = unit.take(min(tokens, unit.tokens), from_end=True)
        if group.heavy[0].tokens == 0:
            group.heavy.popleft()
        return group, unit

    def _light_group(self) -> RowGroup | None:
        """The group whose light rows are next."""
        current = self._current
        if current is not None and current.light and self._quota > 0:
            return current
        if self._source is None or not self._source.light:
            self._light = [g for g in self._light if g.light]
            room = self._room()
            free = [g for g in self._light if not g.heavy]
            begun = [g for g in free if g.begun and self._light_needed_rows[g.number] <= room]
            own = current if current is not None and current.light else None
            self._source = (
                begun[-1]
                if begun
                else self._fitting(free, room) or own or self._fitting(self._light, room)
            )
        return self._source

    def _fitting(self, by_size: list[RowGroup], room: int) -> RowGroup | None:
        """The group with the largest document that fits, or the smallest."""
        fits = [g for g in by_size if self._light_needed_rows[g.number] <= room]
        return fits[-1] if fits else by_size[0] if by_size else None

    def _take_light(self, group: RowGroup, tokens: int) -> Unit:
        self._lights[group.number] += 1
        group.begun = True
        if group is self._current and self._quota > 0:
            tokens = min(tokens, self._quota)
            self._quota -= min(tokens, group.light[0].tokens)
        unit = group.light[0].take(min(tokens, group.light[0].tokens), from_end=False)
        if group.light[0].tokens == 0:
            group.light.popleft()
        return unit


_NOTHING = RowGroup(-1, 0, small=True)


def _tokens(own: list[Taken]) -> int:
    return sum(unit.tokens for _, unit in own)


def _area(own: list[Taken]) -> int:
    return sum(unit.area for _, unit in own)


def _rounded(tokens: float, slack: float, most: int) -> int:
    """The roundest number of tokens within `slack` of the wish."""
    step = 128
    while step > 1:
        near = round(tokens / step) * step
        if near <= most and abs(near - tokens) <= slack:
            return near
        step //= 2
    return min(most, round(tokens))
