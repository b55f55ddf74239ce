/* A library for LD_PRELOAD: from slow_readers() on, MindSpore's receiving threads pause each time they release a lock.
 * So a connection that another thread deletes too early is always found deleted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define READER "RECV_EVENT_LOOP"
#define PAUSE_US 3000

static volatile int slow;

void slow_readers(void) { slow = 1; }

int pthread_mutex_unlock(pthread_mutex_t *mutex) {
    static int (*unlock)(pthread_mutex_t *);
    char name[16] = "";
    if (!unlock) unlock = dlsym(RTLD_NEXT, "pthread_mutex_unlock");
    int result = unlock(mutex);
    if (slow && !prctl(PR_GET_NAME, name) && !strcmp(name, READER)) usleep(PAUSE_US);
    return result;
}
