/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/neighbours.h"

#include <string.h>

#define QUERIES 2 /* the second sees whether a time slot that was taken is kept */

/* ---- priority -------------------------------------------------------------------------------------------------- */

static size_t wanted_at(uint32_t line)
{
	return offsetof(struct aq_priority_page, line) + (line - 1) * sizeof(struct aq_priority_line) +
	       offsetof(struct aq_priority_line, wanted_until_ns);
}

void aq_neighbours_announce(struct aq_node_page *page, uint32_t line, struct aq_priority_own *own, int64_t now_ns, int64_t cost_ns)
{
	int64_t until;

	if (!aq_priority_want(own, now_ns, cost_ns))
		return;
	/* Updated even if there is no page now: so only the next work tries again, and not every launch. */
	bool whole = aq_node_page_read(page, wanted_at(line), &until, sizeof(until));
	until = aq_priority_update(own, whole ? until : 0, now_ns);
	if (whole)
		aq_node_page_write(page, wanted_at(line), &until, sizeof(until));
}

uint32_t aq_neighbours_percent(struct aq_node_page *page, uint32_t line, int64_t now_ns, uint32_t percent)
{
	int64_t until;

	return aq_node_page_read(page, wanted_at(line), &until, sizeof(until)) ? aq_priority_percent(until, now_ns, percent) : percent;
}

/* ---- time slots ------------------------------------------------------------------------------------------------ */

/* Write what changed in the line: this container's own place, and perhaps the holder of the time slot. False = not all of it was written. A
 * container that could not write its place must not write a holder either. */
static bool write_changes(struct aq_node_page *page, size_t at, const struct aq_turns_line *before, const struct aq_turns_line *line)
{
	for (uint32_t i = 0; i < AQ_TURNS_SLOTS; i++)
		if (memcmp(&before->slot[i], &line->slot[i], sizeof(line->slot[i])) != 0 &&
		    !aq_node_page_write(page, at + offsetof(struct aq_turns_line, slot[i]), &line->slot[i], sizeof(line->slot[i])))
			return false;
	return before->turn == line->turn ||
	       aq_node_page_write(page, at + offsetof(struct aq_turns_line, turn), &line->turn, sizeof(line->turn));
}

struct aq_turns_reply aq_neighbours_turn(struct aq_node_page *page, uint32_t line, const struct aq_turns_party *party, int64_t now_ns)
{
	size_t at = offsetof(struct aq_turns_page, line) + (line - 1) * sizeof(struct aq_turns_line);
	struct aq_turns_reply reply = { .may_run = true };
	struct aq_turns_line before, after;

	for (int i = 0; i < QUERIES && aq_node_page_read(page, at, &before, sizeof(before)); i++) {
		after = before;
		reply = aq_turns_query(&after, party, now_ns);
		/* a container that the others do not see gets no time slot and need not wait for one */
		if (!write_changes(page, at, &before, &after))
			return (struct aq_turns_reply){ .may_run = true };
		if (after.turn == before.turn)
			break;
	}
	return reply;
}
