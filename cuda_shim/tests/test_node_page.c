/* The node's pages while one who may write them does his worst: nobody else is harmed, and a page that is mended works again. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "interpose/neighbours.h"
#include "tests/support.h"

#define MS 1000000ll
#define GIB (1024 * MIB)
#define LINE 3u
#define WORKERS 4
#define TORMENT_NS (300 * MS)

static char path[4096];

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* As the agent does it: over what is there, so that those who have it open see it. */
static void mend(uint64_t magic, size_t bytes)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	char *content = calloc(1, bytes);

	CHECK(fd >= 0 && content);
	memcpy(content, &magic, sizeof magic);
	CHECK(ftruncate(fd, (off_t)bytes) == 0 && pwrite(fd, content, bytes, 0) == (ssize_t)bytes);
	close(fd);
	free(content);
}

static void scribble(unsigned char byte, size_t bytes)
{
	char content[65536];
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	memset(content, byte, sizeof content);
	CHECK(fd >= 0 && write(fd, content, bytes) == (ssize_t)bytes);
	close(fd);
}

static struct aq_node_page opened(uint64_t magic)
{
	struct aq_node_page page;

	aq_node_page_open(&page, path, magic);
	CHECK(page.magic && page.writable);
	return page;
}

static struct aq_turns_party party(uint64_t owner)
{
	return (struct aq_turns_party){ .owner = owner, .demand_bytes = 10 * GIB, .capacity_bytes = 16 * GIB };
}

/* One of those who use the pages, launch after launch, until it is ended. */
static pid_t worker(unsigned index, uint64_t magic)
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid)
		return pid;
	struct aq_node_page page = opened(magic);
	struct aq_priority_own own = { 0 };
	struct aq_turns_party asks = party(100 + index);
	for (;;) {
		if (magic == AQ_TURNS_MAGIC)
			aq_neighbours_turn(&page, LINE, &asks, now_ns());
		else if (index % 2)
			aq_neighbours_want(&page, LINE, &own, now_ns(), MS);
		else
			aq_neighbours_percent(&page, LINE, now_ns(), 40);
	}
}

static void nobody_dies_of_what_another_does_to_the_page(uint64_t magic, size_t bytes)
{
	pid_t workers[WORKERS];
	uint32_t random = 7;
	int status;

	mend(magic, bytes);
	for (unsigned i = 0; i < WORKERS; i++)
		workers[i] = worker(i, magic);
	for (int64_t end = now_ns() + TORMENT_NS; now_ns() < end;) {
		CHECK(truncate(path, support_random(&random) % bytes) == 0);
		CHECK(truncate(path, 0) == 0);
		scribble((unsigned char)support_random(&random), bytes);
		mend(magic, bytes);
	}
	for (unsigned i = 0; i < WORKERS; i++) {
		CHECK(waitpid(workers[i], &status, WNOHANG) == 0); /* it goes on */
		kill(workers[i], SIGKILL);
		CHECK(waitpid(workers[i], &status, 0) == workers[i]);
	}
}

static void priority_ends_with_the_page_and_is_back_when_it_is_mended(void)
{
	struct aq_priority_own own = { 0 };
	int64_t now = now_ns();

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page high = opened(AQ_PRIORITY_MAGIC), low = opened(AQ_PRIORITY_MAGIC);
	aq_neighbours_want(&high, LINE, &own, now, 100 * MS);
	CHECK(aq_neighbours_percent(&low, LINE, now, 40) == AQ_PRIORITY_TRICKLE_PERCENT);
	CHECK(aq_neighbours_percent(&low, LINE + 1, now, 40) == 40);
	CHECK(truncate(path, 0) == 0);
	CHECK(aq_neighbours_percent(&low, LINE, now, 40) == 40);
	aq_neighbours_want(&high, LINE, &own, now, MS);
	struct aq_node_page late = opened(AQ_PRIORITY_MAGIC); /* a container that starts now */
	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	CHECK(aq_neighbours_percent(&low, LINE, now, 40) == 40);
	aq_neighbours_want(&high, LINE, &own, now, MS);
	CHECK(aq_neighbours_percent(&low, LINE, now + 90 * MS, 40) == AQ_PRIORITY_TRICKLE_PERCENT); /* with what it had launched before */
	CHECK(aq_neighbours_percent(&late, LINE, now + 90 * MS, 40) == AQ_PRIORITY_TRICKLE_PERCENT);
	aq_node_page_close(&high);
	aq_node_page_close(&low);
	aq_node_page_close(&late);
}

static uint64_t turn_on_page(const struct aq_node_page *page)
{
	struct aq_turns_line line;

	CHECK(aq_node_page_read(page, sizeof line * LINE, &line, sizeof line));
	return line.turn;
}

static void a_turn_is_one_containers_at_a_time_and_lost_with_the_page(void)
{
	struct aq_turns_party one = party(1), other = party(2);
	int64_t now = now_ns();

	mend(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	struct aq_node_page page = opened(AQ_TURNS_MAGIC);
	CHECK(aq_neighbours_turn(&page, LINE, &one, now).may_run); /* alone */
	CHECK(turn_on_page(&page) == 0);
	bool other_runs = aq_neighbours_turn(&page, LINE, &other, now + MS).may_run;
	CHECK(aq_neighbours_turn(&page, LINE, &one, now + 2 * MS).may_run != other_runs);
	CHECK(turn_on_page(&page) != 0);
	CHECK(truncate(path, 100) == 0);
	CHECK(aq_neighbours_turn(&page, LINE, &one, now + 3 * MS).may_run && aq_neighbours_turn(&page, LINE, &other, now + 3 * MS).may_run);
	mend(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	other_runs = aq_neighbours_turn(&page, LINE, &other, now + 4 * MS).may_run;
	CHECK(other_runs); /* nobody else is known yet */
	bool one_runs = aq_neighbours_turn(&page, LINE, &one, now + 5 * MS).may_run;
	CHECK(aq_neighbours_turn(&page, LINE, &other, now + 6 * MS).may_run != one_runs);
	aq_node_page_close(&page);
}

/* Two who took a turn in the same moment: what the other wrote last is found at the next question. */
static void the_last_who_wrote_has_the_turn(void)
{
	struct aq_turns_party one = party(1), other = party(2);
	struct aq_turns_line line;
	int64_t now = now_ns();

	mend(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	struct aq_node_page page = opened(AQ_TURNS_MAGIC);
	aq_neighbours_turn(&page, LINE, &one, now);
	CHECK(aq_node_page_read(&page, sizeof line * LINE, &line, sizeof line));
	aq_turns_ask(&line, &other, now); /* sees the line as it was … */
	CHECK(line.turn);
	aq_neighbours_turn(&page, LINE, &other, now);
	CHECK(aq_node_page_write(&page, sizeof line * LINE, &line.turn, sizeof line.turn)); /* … and writes over what came in between */
	bool one_runs = aq_neighbours_turn(&page, LINE, &one, now + MS).may_run;
	CHECK(aq_neighbours_turn(&page, LINE, &other, now + MS).may_run != one_runs);
	aq_node_page_close(&page);
}

/* Each turn has another number, and memory is sent for when the number changes: one that nobody was told of must have none. */
static void a_turn_that_cannot_be_told_is_none(void)
{
	struct aq_turns_party one = party(1), other = party(2);
	int64_t now = now_ns();

	mend(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	struct aq_node_page page = opened(AQ_TURNS_MAGIC);
	CHECK(aq_neighbours_turn(&page, LINE, &other, now).may_run);
	atomic_store(&page.settled_ns, INT64_MAX); /* as after slow writes */
	for (unsigned i = 0; i < 3; i++) {
		struct aq_turns_answer answer = aq_neighbours_turn(&page, LINE, &one, now + i * MS);
		CHECK(answer.may_run && answer.turn == 0);
	}
	CHECK(turn_on_page(&page) == 0);
	atomic_store(&page.settled_ns, 0);
	struct aq_turns_answer taken = aq_neighbours_turn(&page, LINE, &one, now + 30 * MS);
	if (!taken.may_run) /* the other is next, and does not come */
		taken = aq_neighbours_turn(&page, LINE, &one, now + 60 * MS);
	CHECK(taken.may_run && taken.turn && taken.turn == turn_on_page(&page));
	CHECK(!aq_neighbours_turn(&page, LINE, &other, now + 61 * MS).may_run);
	atomic_store(&page.settled_ns, INT64_MAX);
	struct aq_turns_answer unseen = aq_neighbours_turn(&page, LINE, &other, now + 90 * MS); /* would wait in a line that it is not in */
	CHECK(unseen.may_run && unseen.turn == 0 && turn_on_page(&page) == taken.turn);
	aq_node_page_close(&page);
}

/* A program that closes what it does not know, and opens a file of its own. */
static void another_file_under_the_descriptors_number_is_left_alone(void)
{
	struct aq_priority_own own = { 0 };
	char own_path[sizeof path + 8], content[8192];

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
	close(page.fd);
	snprintf(own_path, sizeof own_path, "%s.own", path);
	int fd = open(own_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	CHECK(fd == page.fd && ftruncate(fd, 4096) == 0);
	errno = EDOM;
	aq_neighbours_want(&page, LINE, &own, now_ns(), MS);
	CHECK(aq_neighbours_percent(&page, LINE, now_ns(), 40) == 40);
	aq_node_page_close(&page);
	CHECK(errno == EDOM);
	CHECK(pread(fd, content, sizeof content, 0) == 4096);
	for (unsigned i = 0; i < 4096; i++)
		CHECK(content[i] == 0);
	close(fd);
	unlink(own_path);
}

static void a_program_that_may_write_no_files_is_not_ended_for_it(void)
{
	struct rlimit none = { 0, 0 };
	struct aq_priority_own own = { 0 };
	int status;

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
		if (setrlimit(RLIMIT_FSIZE, &none))
			_exit(1);
		aq_neighbours_want(&page, LINE, &own, now_ns(), MS);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Another's endless write would hold up every launch; so one that took long is made up for. */
static void writing_takes_a_small_part_of_the_time(void)
{
	int64_t word = 0;

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
	CHECK(aq_node_page_write(&page, 64, &word, sizeof word));
	atomic_store(&page.settled_ns, now_ns() + 60000 * MS); /* as after slow writes of 3 s together */
	CHECK(!aq_node_page_write(&page, 64, &word, sizeof word));
	atomic_store(&page.settled_ns, now_ns()); /* the time has passed */
	CHECK(aq_node_page_write(&page, 64, &word, sizeof word));
	aq_node_page_close(&page);
}

static int64_t silent_ns(const struct aq_node_page *page, int64_t since_ns)
{
	return atomic_load(&page->settled_ns) - since_ns;
}

/* A thread that lost its processor for 30 ms in the middle of one: who wants the device first could not say so for 0.6 s. */
static void one_slow_write_is_forgiven_and_the_next_is_made_up_for_with_it(void)
{
	int64_t word = 0, begin = now_ns() - 100 * MS;

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
	aq_node_page_took(&page, begin, begin + 30 * MS);
	CHECK(silent_ns(&page, begin + 30 * MS) <= 0);
	CHECK(aq_node_page_write(&page, 64, &word, sizeof word));
	aq_node_page_close(&page);

	page = opened(AQ_PRIORITY_MAGIC);
	aq_node_page_took(&page, begin, begin + 30 * MS);
	aq_node_page_took(&page, begin + 40 * MS, begin + 40 * MS + 2000); /* a quick one in between is no excuse */
	CHECK(silent_ns(&page, begin + 40 * MS) < MS);
	aq_node_page_took(&page, begin + 50 * MS, begin + 60 * MS);
	CHECK(silent_ns(&page, begin) >= 20 * (30 + 10) * MS && silent_ns(&page, begin) < 20 * (30 + 11) * MS);
	CHECK(!aq_node_page_write(&page, 64, &word, sizeof word));
	int64_t later = begin + 1000 * MS; /* made up for: again one is free */
	aq_node_page_took(&page, later, later + 30 * MS);
	CHECK(silent_ns(&page, later + 30 * MS) <= 0);
	aq_node_page_close(&page);
}

/* Whoever keeps the file for 10 ms of every 11 lets a quick write through between any two slow ones. */
static void no_pattern_of_slow_writes_takes_more_than_a_twentieth(void)
{
	int64_t spent = 0, now = 1000 * MS, begin = now, end = now + 60000 * MS;

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
	while (now < end) {
		int64_t in_turn = (now - begin) % (11 * MS), took = in_turn < 10 * MS ? 10 * MS - in_turn : 2000;

		if (atomic_load(&page.settled_ns) > now + MS) {
			now += 100000;
			continue;
		}
		aq_node_page_took(&page, now, now + took);
		now += took;
		spent += took;
	}
	CHECK(spent * 20 <= end - begin + 2 * 20 * 10 * MS); /* and the last ones are still to be made up for */
	CHECK(spent * 40 > end - begin);
	aq_node_page_close(&page);
}

int main(void)
{
	snprintf(path, sizeof path, "%s/page", support_directory());
	nobody_dies_of_what_another_does_to_the_page(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	nobody_dies_of_what_another_does_to_the_page(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	priority_ends_with_the_page_and_is_back_when_it_is_mended();
	a_turn_is_one_containers_at_a_time_and_lost_with_the_page();
	the_last_who_wrote_has_the_turn();
	a_turn_that_cannot_be_told_is_none();
	another_file_under_the_descriptors_number_is_left_alone();
	a_program_that_may_write_no_files_is_not_ended_for_it();
	writing_takes_a_small_part_of_the_time();
	one_slow_write_is_forgiven_and_the_next_is_made_up_for_with_it();
	no_pattern_of_slow_writes_takes_more_than_a_twentieth();
	unlink(path);
	support_remove();
	return 0;
}
