/* Best-fit packing of documents, move by move as in pack/best_fit.py: see there for what it does and why. */

#include "kernel_spaces.h"

#define DIGIT_BITS 11

/* Some rows of one move, from its row `first` on, that have the same space; below it lies the group put there before. */
typedef struct {
    int64_t node, first, rows, below;
} Group;

typedef struct {
    int64_t parent, first, length, per_row, offset;
} Move;

typedef struct {
    int64_t seq_len, rows;
    Move *moves;
    Group *groups;
    int64_t move_count, move_room, group_count, group_room;
    Spaces spaces;
} Packer;

static int prepare(Packer *packer, int64_t seq_len) {
    *packer = (Packer){.seq_len = seq_len};
    return prepare_spaces(&packer->spaces, seq_len);
}

static void begin_again(Packer *packer) {
    packer->rows = packer->move_count = packer->group_count = 0;
    close_all(&packer->spaces);
}

static void discard(Packer *packer) {
    free(packer->moves);
    free(packer->groups);
    free(packer->spaces.top);
    free(packer->spaces.bits[0]);
    free(packer->spaces.space);
}

static int put_group(Packer *packer, int64_t space, int64_t node, int64_t first, int64_t rows) {
    int64_t count = packer->group_count, slot = opened_slot(&packer->spaces, space);
    if (slot == NONE) return NO_MEMORY;
    Group *groups = with_room(packer->groups, &packer->group_room, count, 1, sizeof *groups);
    if (!groups) return NO_MEMORY;
    packer->groups = groups;
    groups[count] = (Group){node, first, rows, packer->spaces.top[slot]};
    packer->spaces.top[slot] = packer->group_count++;
    return FINE;
}

static Group take_group(Packer *packer, int64_t slot) {
    Group group = packer->groups[packer->spaces.top[slot]];
    packer->spaces.top[slot] = group.below;
    if (group.below == NONE) close_slot(&packer->spaces, slot);
    return group;
}

/* `rows` rows with a space, from row `first` of the move `node` on, take `per_row` documents each. */
static int move_rows(Packer *packer, int64_t node, int64_t first, int64_t rows, int64_t space, int64_t length,
                     int64_t per_row, int64_t offset) {
    int64_t number = packer->move_count;
    Move *moves = with_room(packer->moves, &packer->move_room, number, 1, sizeof *moves);
    if (!moves) return NO_MEMORY;
    packer->moves = moves;
    moves[number] = (Move){node, first, length, per_row, offset};
    packer->move_count++;
    if (node == NONE && __builtin_add_overflow(packer->rows, rows, &packer->rows)) return DAMAGED;
    return put_group(packer, space - per_row * length, number, 0, rows);
}

/* Put documents, from `*offset` to `count`, into the rows of a group; rows that are left over stay open. */
static int fill_group(Packer *packer, Group group, int64_t space, int64_t length, int64_t count, int64_t *offset) {
    int64_t per_row = space / length, left = count - *offset;
    int64_t full = left / per_row < group.rows ? left / per_row : group.rows;
    int failed = FINE;
    if (full) failed = move_rows(packer, group.node, group.first, full, space, length, per_row, *offset);
    *offset += full * per_row;
    left -= full * per_row;
    if (!failed && full < group.rows && left > 0 && left < per_row) {
        failed = move_rows(packer, group.node, group.first + full, 1, space, length, left, *offset);
        *offset += left;
        full++;
    }
    if (!failed && group.node != NONE && full < group.rows)
        failed = put_group(packer, space, group.node, group.first + full, group.rows - full);
    return failed;
}

/* Put `count` documents of one length into the smallest spaces that hold them. Lengths must not grow. */
static int add(Packer *packer, int64_t length, int64_t count) {
    int64_t offset = 0;
    int failed = FINE;
    while (offset < count && !failed) {
        int64_t slot = slot_from(&packer->spaces, length), space = packer->seq_len;
        Group group = {NONE, 0, count, NONE};
        if (slot != NONE) {
            space = space_at(&packer->spaces, slot);
            group = take_group(packer, slot);
        }
        failed = fill_group(packer, group, space, length, count, &offset);
    }
    return failed;
}

static int add_histogram(Packer *packer, const int64_t *lengths, const int64_t *counts, Py_ssize_t n) {
    int failed = FINE;
    for (Py_ssize_t i = 0; i < n && !failed; i++) {
        int fits = lengths[i] >= 1 && lengths[i] <= packer->seq_len && counts[i] >= 0;
        if (!fits || (i && lengths[i] > lengths[i - 1])) return DAMAGED;
        failed = add(packer, lengths[i], counts[i]);
    }
    return failed;
}

/* What `plan` returns: columns, end to end */

static void write_moves(const Packer *packer, int64_t *out) {
    int64_t count = packer->move_count;
    for (int64_t i = 0; i < count; i++) {
        Move move = packer->moves[i];
        out[i] = move.parent, out[count + i] = move.first, out[2 * count + i] = move.length;
        out[3 * count + i] = move.per_row, out[4 * count + i] = move.offset;
    }
}

static int64_t open_groups(const Packer *packer) {
    const Spaces *spaces = &packer->spaces;
    int64_t total = 0;
    for (int64_t slot = slot_from(spaces, 0); slot != NONE; slot = slot_from(spaces, space_at(spaces, slot) + 1))
        for (int64_t number = spaces->top[slot]; number != NONE; number = packer->groups[number].below) total++;
    return total;
}

/* The open groups, by space; of one space, in the order in which they came. */
static void write_leaves(const Packer *packer, int64_t count, int64_t *node, int64_t *first, int64_t *start) {
    const Spaces *spaces = &packer->spaces;
    int64_t end = 0;
    for (int64_t slot = slot_from(spaces, 0); slot != NONE; slot = slot_from(spaces, space_at(spaces, slot) + 1)) {
        for (int64_t number = spaces->top[slot]; number != NONE; number = packer->groups[number].below) end++;
        int64_t at = end;
        for (int64_t number = spaces->top[slot]; number != NONE; number = packer->groups[number].below) {
            Group group = packer->groups[number];
            at--;
            node[at] = group.node, first[at] = group.first, start[at + 1] = group.rows;
        }
    }
    start[0] = 0;
    for (int64_t i = 0; i < count; i++) start[i + 1] += start[i];
}

static PyObject *columns(int64_t items) {
    if (items > PY_SSIZE_T_MAX / (int64_t)sizeof items) return PyErr_NoMemory();
    return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(items * (int64_t)sizeof items));
}

/* plan(lengths, counts, seq_len): plan_best_fit of pack/best_fit.py. Lengths are from 1 to seq_len, and descend.
   -> two strings of int64: parent, first, length, per_row and offset of all moves; node, first and start of all
   leaves, and the number of rows. */
PyObject *plan(PyObject *self, PyObject *args) {
    PyObject *o[2], *moves = NULL, *leaves = NULL, *both = NULL;
    long long seq_len;
    if (!PyArg_ParseTuple(args, "OOL", &o[0], &o[1], &seq_len)) return NULL;
    Held held = {.count = 0};
    Packer packer = {.seq_len = 0};
    Py_ssize_t n, n2;
    const int64_t *lengths, *counts;
    TAKE(lengths, o[0], 8, 0, &n)
    TAKE(counts, o[1], 8, 0, &n2)
    NEED(n == n2, "arrays differ in length")
    NEED(seq_len >= 1, "seq_len: must be at least 1")
    int failed;
    int64_t leaf_count = 0;
    Py_BEGIN_ALLOW_THREADS
    failed = prepare(&packer, seq_len);
    if (!failed) failed = add_histogram(&packer, lengths, counts, n);
    if (!failed) leaf_count = open_groups(&packer);
    Py_END_ALLOW_THREADS
    NEED(failed != DAMAGED, "lengths must descend from seq_len at most to 1 at least, and counts must not overflow")
    if (failed == NO_MEMORY) {
        PyErr_NoMemory();
        goto fail;
    }
    moves = columns(5 * packer.move_count);
    leaves = columns(3 * leaf_count + 1);
    if (!moves || !leaves) goto fail;
    int64_t *of_moves = (int64_t *)PyBytes_AsString(moves), *of_leaves = (int64_t *)PyBytes_AsString(leaves);
    Py_BEGIN_ALLOW_THREADS
    write_moves(&packer, of_moves);
    write_leaves(&packer, leaf_count, of_leaves, of_leaves + leaf_count, of_leaves + 2 * leaf_count);
    Py_END_ALLOW_THREADS
    both = PyTuple_Pack(2, moves, leaves);
fail:
    Py_XDECREF(moves);
    Py_XDECREF(leaves);
    discard(&packer);
    release(&held);
    return both;
}

/* Counting rows of many units */

/* The numbers, from 0 to `most`, in ascending order; they are in one of the two arrays. */
static int64_t *sorted(int64_t *numbers, int64_t *spare, int64_t count, int64_t most) {
    for (int shift = 0; shift < 63 && most >> shift; shift += DIGIT_BITS) {
        int64_t place[1 << DIGIT_BITS] = {0}, before = 0, mask = (1 << DIGIT_BITS) - 1;
        for (int64_t i = 0; i < count; i++) place[numbers[i] >> shift & mask]++;
        for (int64_t digit = 0; digit <= mask; digit++) {
            int64_t here = place[digit];
            place[digit] = before;
            before += here;
        }
        for (int64_t i = 0; i < count; i++) spare[place[numbers[i] >> shift & mask]++] = numbers[i];
        int64_t *other = numbers;
        numbers = spare;
        spare = other;
    }
    return numbers;
}

/* The rows of one unit: as in pack/documents.py, full rows of its long documents, and those packed from the rests. */
static int count_unit(Packer *packer, const int64_t *lengths, int64_t count, int64_t *rests, int64_t *spare,
                      int64_t *rows) {
    int64_t full_rows = 0, rest_count = 0, longest = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = lengths[i];
        if (rest < 0) return DAMAGED;
        if (rest >= packer->seq_len) {
            int64_t pieces = rest / packer->seq_len;
            rest -= pieces * packer->seq_len;
            if (__builtin_add_overflow(full_rows, pieces, &full_rows)) return DAMAGED;
        }
        if (rest) rests[rest_count++] = rest;
        longest = rest > longest ? rest : longest;
    }
    rests = sorted(rests, spare, rest_count, longest);
    begin_again(packer);
    int failed = FINE;
    for (int64_t end = rest_count; end && !failed;) {
        int64_t length = rests[end - 1], begin = end;
        while (begin && rests[begin - 1] == length) begin--;
        failed = add(packer, length, end - begin);
        end = begin;
    }
    if (!failed && __builtin_add_overflow(full_rows, packer->rows, rows)) return DAMAGED;
    return failed;
}

static int count_units(int64_t seq_len, const int64_t *lengths, const int64_t *bounds, Py_ssize_t units,
                       int64_t *spare, int64_t most, int64_t *rows, Py_ssize_t step) {
    Packer packer;
    int failed = prepare(&packer, seq_len);
    for (Py_ssize_t unit = 0; unit < units && !failed; unit++) {
        int64_t first = bounds[unit], count = bounds[unit + 1] - first;
        failed = count_unit(&packer, lengths + first, count, spare, spare + most, &rows[unit * step]);
    }
    discard(&packer);
    return failed;
}

/* count_rows(lengths, bounds, seq_lens, rows): the documents bounds[u] to bounds[u + 1] are packed together, by best
   fit, and longer ones are split. Writes how many rows that makes, for each unit and each seq_len. */
PyObject *count_rows(PyObject *self, PyObject *args) {
    PyObject *o[4];
    if (!PyArg_ParseTuple(args, "OOOO", &o[0], &o[1], &o[2], &o[3])) return NULL;
    Held held = {.count = 0};
    Py_ssize_t n, bound_count, choices, cells;
    const int64_t *lengths, *bounds, *seq_lens;
    int64_t *rows, *spare = NULL, most = 0;
    TAKE(lengths, o[0], 8, 0, &n)
    TAKE(bounds, o[1], 8, 0, &bound_count)
    TAKE(seq_lens, o[2], 8, 0, &choices)
    TAKE(rows, o[3], 8, 1, &cells)
    NEED(bound_count >= 1 && rows && cells == (bound_count - 1) * choices, "rows: of another size")
    for (Py_ssize_t unit = 0; unit < bound_count - 1; unit++) {
        NEED(bounds[unit] >= 0 && bounds[unit] <= bounds[unit + 1] && bounds[unit + 1] <= n, "bounds: must ascend")
        most = bounds[unit + 1] - bounds[unit] > most ? bounds[unit + 1] - bounds[unit] : most;
    }
    int failed = FINE;
    for (Py_ssize_t choice = 0; choice < choices; choice++) NEED(seq_lens[choice] >= 1, "seq_lens: must be at least 1")
    Py_BEGIN_ALLOW_THREADS
    spare = malloc((2 * (size_t)most + 1) * sizeof *spare);
    if (!spare) failed = NO_MEMORY;
    for (Py_ssize_t choice = 0; choice < choices && !failed; choice++)
        failed = count_units(seq_lens[choice], lengths, bounds, bound_count - 1, spare, most, rows + choice, choices);
    free(spare);
    Py_END_ALLOW_THREADS
    NEED(failed != DAMAGED, "lengths must be at least 0, and their rows must not overflow")
    if (failed == NO_MEMORY) {
        PyErr_NoMemory();
        goto fail;
    }
    release(&held);
    Py_RETURN_NONE;
fail:
    release(&held);
    return NULL;
}
