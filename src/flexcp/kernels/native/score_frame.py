"""The frame of generated C++: the loops over a tile that the lines of a score function stand in.

`score_source.py` says which line stands in which of them.
"""

from __future__ import annotations

from typing import Literal

Stage = Literal["tile", "row", "column", "distance", "pair"]
"""How often a line is computed."""

ENTRIES = """\
extern "C" {

void flexcp_score(const ScoreTile* tile, float* scores) {
    tile->consecutive ? score<true>(*tile, scores, scores) : score<false>(*tile, scores, scores);
}

void flexcp_pull_back(const ScoreTile* tile, const float* scores, float* gradients) {
    tile->consecutive ? pull_back<true>(*tile, scores, gradients)
                      : pull_back<false>(*tile, scores, gradients);
}

void flexcp_sums(const ScoreTile* tile, const float* scores, const float* gradients, double* sums) {
CALLS;
}

}  // extern "C\""""

FUNCTION = """\
template <bool CONSECUTIVE>
static void {name}({arguments}) {{
    const int64_t* given = tile.given;
    const auto b = static_cast<int32_t>(tile.batch + given[2]);
    const auto h = static_cast<int32_t>(tile.head + given[3]);
{of_tile}\
    const auto of_column = [&](const IntVec k) {{
{of_column}\
        return std::make_tuple({columns});
    }};
    const auto of_distance = [&](const int32_t q, const IntVec k) {{
{of_distance}\
        return std::make_tuple({distances});
    }};
    decltype(of_column(IntVec{{}})) columns[TILE / WIDTH];
    for (int j = 0; j < TILE; j += WIDTH)
        columns[j / WIDTH] = of_column(step::positions(tile.kv_at + j));
    decltype(step::diagonals_of<TILE>(of_distance(0, IntVec{{}}))) diagonals;
    if constexpr (CONSECUTIVE) diagonals.fill(tile.q_at, tile.kv_at, of_distance);
{begin}\
    for (int r = 0; r < tile.rows; r++) {{
        const int32_t q = tile.q_at[r];
{of_row}\
{begin_row}\
        for (int j = tile.first[r / MR]; j < tile.last[r / MR]; j += WIDTH) {{
            const int at = r * TILE + j;
            const Vec s = load(scores + at), g = load(gradients + at);
            const IntVec k = step::positions(tile.kv_at + j);
{bound_columns}\
{bound_distances}\
{of_pair}\
{end_pair}\
        }}
{end_row}\
    }}
{end}\
}}"""
ARGUMENTS = {
    "score": "const ScoreTile& tile, const float* scores, float* gradients",
    "pull_back": "const ScoreTile& tile, const float* scores, float* gradients",
    "sums": "const ScoreTile& tile, const float* scores, const float* gradients, double* sums",
}
STORED = "            store(gradients + at, step::as<Vec>({result}));\n"
# A forbidden pair has a gradient of 0, but the derivative there may not be finite.
FOUND = """\
            const Vec found = g == splat(0.0f) ? g : step::as<Vec>({result});
"""
SUMS: dict[Stage, dict[str, str]] = {
    "row": {
        "begin_row": "        Vec sum{{}};\n",
        "end_pair": "            sum += found;\n",
        "end_row": "        sums[{element}] += total(sum);\n",
    },
    "column": {
        "begin": "    Vec by_column[TILE / WIDTH] = {{}};\n",
        "end_pair": "            by_column[j / WIDTH] += found;\n",
        "end": """\
    for (int j = 0; j < TILE; j += WIDTH) {{
        const auto& [{columns}] = columns[j / WIDTH];
        step::add_each(sums, step::as<LongVec>({element}), by_column[j / WIDTH]);
    }}
""",
    },
    "distance": {
        "begin": "    step::DistanceSums<TILE> by_distance;\n",
        "end_pair": """\
            if constexpr (CONSECUTIVE) by_distance.add(r, j, found);
            else step::add_each(sums, step::as<LongVec>({element}), found);
""",
        "end": """\
    for (int n = 0; CONSECUTIVE && n < 2 * TILE; n += WIDTH) {{
        const auto [{distances}] = diagonals.at(TILE - 1, n);
        step::add_each(sums, step::as<LongVec>({element}), by_distance.at(n));
    }}
""",
    },
    "pair": {
        "end_pair": "            step::add_each(sums, step::as<LongVec>({element}), found);\n",
    },
}
"""How gradients of what is read are added up, by what the element depends on: first those of a row,
a column or a distance, then by element, in double precision."""
INDENT = {"tile": 4, "row": 8, "column": 8, "distance": 8, "pair": 12}
