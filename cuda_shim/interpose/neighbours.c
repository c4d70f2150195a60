#include "interpose/neighbours.h"

#include <string.h>

#define ASKS 2 /* the second sees whether a turn that was taken is kept */

/* ---- priority -------------------------------------------------------------------------------------------------- */

static size_t wanted_at(uint32_t line)
{
	return offsetof(struct aq_priority_page, line) + (line - 1) * sizeof(struct aq_priority_line) +
	       offsetof(struct aq_priority_line, wanted_until_ns);
}

void aq_neighbours_want(struct aq_node_page *page, uint32_t line, struct aq_priority_own *own, int64_t now_ns, int64_t cost_ns)
{
	int64_t until;

	if (!aq_priority_want(own, now_ns, cost_ns))
		return;
	/* Told also where there is no page now: it is tried again with the next work, and not with every launch. */
	bool whole = aq_node_page_read(page, wanted_at(line), &until, sizeof(until));
	until = aq_priority_tell(own, whole ? until : 0, now_ns);
	if (whole)
		aq_node_page_write(page, wanted_at(line), &until, sizeof(until));
}

uint32_t aq_neighbours_percent(const struct aq_node_page *page, uint32_t line, int64_t now_ns, uint32_t percent)
{
	int64_t until;

	return aq_node_page_read(page, wanted_at(line), &until, sizeof(until)) ? aq_priority_percent(until, now_ns, percent) : percent;
}

/* ---- turns ----------------------------------------------------------------------------------------------------- */

/* What the question changed in the line: this container's own place, and perhaps whose turn it is. False = not all of it was told. Whose place
 * is not told must not tell of a turn either. */
static bool write_changes(struct aq_node_page *page, size_t at, const struct aq_turns_line *before, const struct aq_turns_line *line)
{
	for (uint32_t i = 0; i < AQ_TURNS_SLOTS; i++)
		if (memcmp(&before->slot[i], &line->slot[i], sizeof(line->slot[i])) != 0 &&
		    !aq_node_page_write(page, at + offsetof(struct aq_turns_line, slot[i]), &line->slot[i], sizeof(line->slot[i])))
			return false;
	return before->turn == line->turn ||
	       aq_node_page_write(page, at + offsetof(struct aq_turns_line, turn), &line->turn, sizeof(line->turn));
}

struct aq_turns_answer aq_neighbours_turn(struct aq_node_page *page, uint32_t line, const struct aq_turns_party *party, int64_t now_ns)
{
	size_t at = offsetof(struct aq_turns_page, line) + (line - 1) * sizeof(struct aq_turns_line);
	struct aq_turns_answer answer = { .may_run = true };
	struct aq_turns_line before, after;

	for (int i = 0; i < ASKS && aq_node_page_read(page, at, &before, sizeof(before)); i++) {
		after = before;
		answer = aq_turns_ask(&after, party, now_ns);
		if (!write_changes(page, at, &before, &after)) /* whom the others do not see gets no turn, and has none to wait for */
			return (struct aq_turns_answer){ .may_run = true };
		if (after.turn == before.turn)
			break;
	}
	return answer;
}
