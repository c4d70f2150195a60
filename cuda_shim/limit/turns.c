/* SPDX-License-Identifier: Apache-2.0 */
#include "limit/turns.h"

#define HOLDER_MASK 0xffu
#define UNTIL_SHIFT 8
#define LOOK_NS 1000000ll       /* how often to look while a time slot changes hands */
#define UNCLAIMED_NS 20000000ll /* any container may use a time slot that no container took within this time */
#define NO_PLACE AQ_TURNS_SLOTS

/* The content of a line at one moment. */
struct view {
	uint64_t demand_bytes; /* of all active containers together; UINT64_MAX when it overflows */
	uint32_t at_work;
	bool works[AQ_TURNS_SLOTS];
};

static int64_t since(int64_t now_ns, int64_t then_ns)
{
	return (int64_t)((uint64_t)now_ns - (uint64_t)then_ns);
}

/* A time ahead of now is invalid, except for the difference between two processors' clocks. */
static bool is_at_work(const struct aq_turns_slot *slot, int64_t now_ns)
{
	int64_t idle = since(now_ns, slot->seen_ns);

	return slot->owner && idle > -AQ_TURNS_WRITE_NS && idle < AQ_TURNS_IDLE_NS;
}

/* ---- places ---------------------------------------------------------------------------------------------------- */

static uint32_t find(const struct aq_turns_line *line, uint64_t owner)
{
	for (uint32_t i = 0; i < AQ_TURNS_SLOTS; i++)
		if (line->slot[i].owner == owner)
			return i;
	return NO_PLACE;
}

/* A place that was never used, or one with an inactive owner: that container takes another one when it returns. */
static uint32_t claim(struct aq_turns_line *line, uint64_t owner, int64_t now_ns)
{
	for (uint32_t i = 0; i < AQ_TURNS_SLOTS; i++) {
		if (is_at_work(&line->slot[i], now_ns))
			continue;
		line->slot[i].owner = owner;
		return i;
	}
	return NO_PLACE;
}

static void write_presence(struct aq_turns_slot *slot, uint64_t demand_bytes, int64_t now_ns)
{
	int64_t age_ns = since(now_ns, slot->seen_ns);

	slot->demand_bytes = demand_bytes;
	if (age_ns < 0 || age_ns >= AQ_TURNS_WRITE_NS)
		slot->seen_ns = now_ns;
}

static struct view look(const struct aq_turns_line *line, int64_t now_ns)
{
	struct view view = { 0 };

	for (uint32_t i = 0; i < AQ_TURNS_SLOTS; i++) {
		uint64_t demand = line->slot[i].demand_bytes;

		view.works[i] = is_at_work(&line->slot[i], now_ns);
		if (!view.works[i])
			continue;
		view.at_work++;
		if (__builtin_add_overflow(view.demand_bytes, demand, &view.demand_bytes))
			view.demand_bytes = UINT64_MAX;
	}
	return view;
}

/* ---- time slots ------------------------------------------------------------------------------------------------ */

static uint64_t turn_of(uint32_t holder, int64_t until_ns)
{
	return (uint64_t)(until_ns / 1000) << UNTIL_SHIFT | (holder + 1);
}

static uint32_t holder_of(uint64_t turn)
{
	uint32_t holder = (uint32_t)(turn & HOLDER_MASK) - 1;

	return holder < AQ_TURNS_SLOTS ? holder : NO_PLACE;
}

/* How long the time slot still lasts; not above 0 when it is over. A value longer than any time slot is invalid. */
static int64_t left_of(uint64_t turn, int64_t now_ns)
{
	int64_t left = since((int64_t)((turn >> UNTIL_SHIFT) * 1000), now_ns);

	return left > AQ_TURNS_MOST_NS ? -UNCLAIMED_NS : left;
}

/* With every time slot, the memory that does not fit changes places, and at most as much as the container of the time slot holds. */
static int64_t length_ns(const struct view *view, const struct aq_turns_party *party)
{
	uint64_t excess = view->demand_bytes - party->capacity_bytes;
	uint64_t moved = excess < party->demand_bytes ? excess : party->demand_bytes;
	uint64_t length = moved / AQ_TURNS_BYTES_PER_NS;

	if (length > (uint64_t)AQ_TURNS_MOST_NS / AQ_TURNS_SWAPS)
		return AQ_TURNS_MOST_NS;
	length *= AQ_TURNS_SWAPS;
	return (int64_t)length < AQ_TURNS_LEAST_NS ? AQ_TURNS_LEAST_NS : (int64_t)length;
}

/* The next active container after `holder`, round the line; the holder itself when there is no other. */
static uint32_t next_after(const struct view *view, uint32_t holder)
{
	for (uint32_t step = 1; step <= AQ_TURNS_SLOTS; step++) {
		uint32_t i = (holder + step) % AQ_TURNS_SLOTS;

		if (view->works[i])
			return i;
	}
	return NO_PLACE;
}

/* A container that is alone finds the device as it left it: it has no time slot. */
static struct aq_turns_reply run_in(const struct view *view, uint64_t turn)
{
	return (struct aq_turns_reply){ .may_run = true, .turn = view->at_work > 1 ? turn : 0 };
}

static struct aq_turns_reply wait_for(const struct view *view, int64_t left_ns)
{
	return (struct aq_turns_reply){
		.retry_ns = left_ns > LOOK_NS ? left_ns : LOOK_NS,
		.patience_ns = (int64_t)(view->at_work + 1) * AQ_TURNS_MOST_NS,
	};
}

/* It does not fit: does this container have the time slot, or can it take it? */
static struct aq_turns_reply take_turn(struct aq_turns_line *line, const struct view *view, const struct aq_turns_party *party, uint32_t me,
				       int64_t now_ns)
{
	uint64_t turn = line->turn;
	uint32_t holder = holder_of(turn);
	int64_t left = left_of(turn, now_ns);

	if (holder != NO_PLACE && left > 0 && view->works[holder])
		return holder == me ? run_in(view, turn) : wait_for(view, left);
	uint32_t next = next_after(view, holder == NO_PLACE ? AQ_TURNS_SLOTS - 1 : holder);
	if (next != me && left > -UNCLAIMED_NS)
		return wait_for(view, 0);
	line->turn = turn_of(me, now_ns + length_ns(view, party));
	return run_in(view, line->turn);
}

struct aq_turns_reply aq_turns_query(struct aq_turns_line *line, const struct aq_turns_party *party, int64_t now_ns)
{
	uint32_t me = find(line, party->owner);

	if (me == NO_PLACE)
		me = claim(line, party->owner, now_ns);
	if (me == NO_PLACE) /* more active containers than places in the line: this one does not take part */
		return (struct aq_turns_reply){ .may_run = true };
	write_presence(&line->slot[me], party->demand_bytes, now_ns);
	struct view view = look(line, now_ns);
	if (view.demand_bytes <= party->capacity_bytes)
		return (struct aq_turns_reply){ .may_run = true };
	return take_turn(line, &view, party, me, now_ns);
}
