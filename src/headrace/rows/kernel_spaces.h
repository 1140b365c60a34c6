/* The open spaces of rows while they are packed by best fit: "the smallest that is at least so large". */

#include <stdlib.h>

#include "kernel.h"

#define NONE -1
#define LEVELS 4
/* Up to this seq_len every space has a place in tables; beyond it, memory follows the number of open spaces. */
#define MOST_TABLED ((int64_t)1 << 20)

enum { FINE, DAMAGED, NO_MEMORY };

/* Each open space has a slot, which knows the last group of rows with that space.

   In tables, the slot of a space is the space itself. Bit s of level 0 says whether space s is open, and a bit of any
   other level whether a word of the level below has bits: so the next open space is found in a few steps.
   Otherwise, the slots are the open spaces in ascending order. */
typedef struct {
    int tabled;
    int64_t *top;
    uint64_t *bits[LEVELS];
    int64_t words[LEVELS], all_words;
    int64_t *space;
    int64_t count, room;
} Spaces;

/* Make room for `more` items. Returns the items, which may have moved, or NULL. */
static void *with_room(void *items, int64_t *room, int64_t count, int64_t more, size_t item_bytes) {
    if (count + more <= *room) return items;
    int64_t wanted = 2 * *room + more + 1024;
    void *moved = realloc(items, (size_t)wanted * item_bytes);
    if (moved) *room = wanted;
    return moved;
}

static int prepare_spaces(Spaces *spaces, int64_t seq_len) {
    spaces->tabled = seq_len <= MOST_TABLED;
    if (!spaces->tabled) return FINE;
    for (int level = 0; level < LEVELS; level++) {
        spaces->words[level] = (seq_len >> 6 * (level + 1)) + 1;
        spaces->all_words += spaces->words[level];
    }
    spaces->bits[0] = calloc((size_t)spaces->all_words, sizeof *spaces->bits[0]);
    spaces->top = malloc(((size_t)seq_len + 1) * sizeof *spaces->top);
    if (!spaces->bits[0] || !spaces->top) return NO_MEMORY;
    for (int level = 1; level < LEVELS; level++)
        spaces->bits[level] = spaces->bits[level - 1] + spaces->words[level - 1];
    return FINE;
}

static void close_all(Spaces *spaces) {
    spaces->count = 0;
    if (spaces->tabled) memset(spaces->bits[0], 0, (size_t)spaces->all_words * sizeof *spaces->bits[0]);
}

/* The slot of the smallest open space that is at least `space`, or NONE. */
static int64_t tabled_slot_from(const Spaces *spaces, int64_t space) {
    for (int level = 0; level < LEVELS && space >> 6 < spaces->words[level]; level++) {
        uint64_t found = spaces->bits[level][space >> 6] & ~0ULL << (space & 63);
        if (found) {
            int64_t slot = (space >> 6) << 6 | __builtin_ctzll(found);
            while (level--) slot = slot << 6 | __builtin_ctzll(spaces->bits[level][slot]);
            return slot;
        }
        space = (space >> 6) + 1;
    }
    return NONE;
}

/* How many open spaces are smaller than `space`. */
static int64_t smaller_spaces(const Spaces *spaces, int64_t space) {
    int64_t low = 0, high = spaces->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (spaces->space[middle] < space) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int64_t slot_from(const Spaces *spaces, int64_t space) {
    if (spaces->tabled) return tabled_slot_from(spaces, space);
    int64_t slot = smaller_spaces(spaces, space);
    return slot < spaces->count ? slot : NONE;
}

static int64_t space_at(const Spaces *spaces, int64_t slot) {
    return spaces->tabled ? slot : spaces->space[slot];
}

static void set_bits(Spaces *spaces, int64_t space) {
    for (int level = 0; level < LEVELS; level++, space >>= 6) {
        uint64_t *word = &spaces->bits[level][space >> 6], before = *word;
        *word |= 1ULL << (space & 63);
        if (before) return;
    }
}

static void clear_bits(Spaces *spaces, int64_t space) {
    for (int level = 0; level < LEVELS; level++, space >>= 6) {
        uint64_t *word = &spaces->bits[level][space >> 6];
        *word &= ~(1ULL << (space & 63));
        if (*word) return;
    }
}

/* The slot of a space, which is opened if it is not; NONE if there is no memory for it. */
static int64_t opened_slot(Spaces *spaces, int64_t space) {
    if (spaces->tabled) {
        if (!(spaces->bits[0][space >> 6] >> (space & 63) & 1)) {
            set_bits(spaces, space);
            spaces->top[space] = NONE;
        }
        return space;
    }
    int64_t slot = smaller_spaces(spaces, space), room = spaces->room;
    if (slot < spaces->count && spaces->space[slot] == space) return slot;
    int64_t *space_moved = with_room(spaces->space, &room, spaces->count, 1, sizeof *spaces->space);
    if (!space_moved) return NONE;
    spaces->space = space_moved;
    int64_t *top_moved = with_room(spaces->top, &spaces->room, spaces->count, 1, sizeof *spaces->top);
    if (!top_moved) return NONE;
    spaces->top = top_moved;
    size_t after = (size_t)(spaces->count++ - slot) * sizeof *spaces->space;
    memmove(&spaces->space[slot + 1], &spaces->space[slot], after);
    memmove(&spaces->top[slot + 1], &spaces->top[slot], after);
    spaces->space[slot] = space;
    spaces->top[slot] = NONE;
    return slot;
}

static void close_slot(Spaces *spaces, int64_t slot) {
    if (spaces->tabled) {
        clear_bits(spaces, slot);
        return;
    }
    size_t after = (size_t)(--spaces->count - slot) * sizeof *spaces->space;
    memmove(&spaces->space[slot], &spaces->space[slot + 1], after);
    memmove(&spaces->top[slot], &spaces->top[slot + 1], after);
}
