/* SPDX-License-Identifier: Apache-2.0 */
/* profiles.h - the topologies of sim/profiles/ as data. The build writes profiles.c from the files; each is there word for word. */
#ifndef ALIQUOT_SIM_PROFILES_H
#define ALIQUOT_SIM_PROFILES_H

struct sim_profile {
	const char *name;
	const char *text;
};

extern const struct sim_profile sim_profiles[];     /* ends with a NULL name */

#endif
