/* Preloaded into a program and all that it starts, it shows them a CPU that lacks features of this one.

   The kernel makes the CPUID instruction fault in user space (arch_prctl, ARCH_SET_CPUID: a flag of each thread, which
   threads and forks inherit, and which an exec clears, after which the library is loaded again). The handler executes
   the instruction and clears bits of its answer. Everything else runs at the speed of this CPU. XGETBV does not fault:
   it still says that the system keeps wide registers, which nothing reads without CPUID's word that there are any.

   -DEBX_7=, ECX_7=, EDX_7=, EAX_7_1=, EDX_7_1=: bits to clear in leaf 7 and leaf 7.1.  -DCPUINFO=: the file that is
   opened for /proc/cpuinfo. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

typedef int (*set_action)(int, const struct sigaction *, struct sigaction *);

/* What the program wants done about SIGSEGV, which the library's own handler passes on. */
static struct sigaction wanted;

static int set_real_action(int number, const struct sigaction *action, struct sigaction *before) {
    static set_action real;
    if (!real) real = (set_action)dlsym(RTLD_NEXT, "sigaction");
    return real(number, action, before);
}

/* Whether the instruction that faulted is CPUID; its answer is then in the registers, and the program goes on. */
static int answer_cpuid(const siginfo_t *fault, greg_t *registers) {
    if (fault->si_code != SI_KERNEL || memcmp((void *)registers[REG_RIP], "\x0f\xa2", 2)) return 0;
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], eax, ebx, ecx, edx;
    int error = errno;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, part, eax, ebx, ecx, edx);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    errno = error;
    if (leaf == 7 && part == 0) ebx &= ~EBX_7, ecx &= ~ECX_7, edx &= ~EDX_7;
    if (leaf == 7 && part == 1) eax &= ~EAX_7_1, edx &= ~EDX_7_1;
    registers[REG_RAX] = eax, registers[REG_RBX] = ebx, registers[REG_RCX] = ecx, registers[REG_RDX] = edx;
    registers[REG_RIP] += 2;
    return 1;
}

static void handle(int number, siginfo_t *fault, void *context) {
    if (answer_cpuid(fault, ((ucontext_t *)context)->uc_mcontext.gregs)) return;
    if (wanted.sa_handler == SIG_DFL || wanted.sa_handler == SIG_IGN) {
        set_real_action(number, &wanted, NULL);
        raise(number);
    } else if (wanted.sa_flags & SA_SIGINFO) {
        wanted.sa_sigaction(number, fault, context);
    } else {
        wanted.sa_handler(number);
    }
}

int sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    if (number != SIGSEGV) return set_real_action(number, action, before);
    struct sigaction kept = wanted;
    if (action) wanted = *action;
    if (before) *before = kept;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    return sigaction(number, &action, &before) ? SIG_ERR : before.sa_handler;
}

static const char *shown(const char *path) { return path && !strcmp(path, "/proc/cpuinfo") ? CPUINFO : path; }

#define OPENS(name)                                       \
    int name(const char *path, int flags, ...) {          \
        va_list more;                                     \
        va_start(more, flags);                            \
        mode_t mode = va_arg(more, mode_t);               \
        va_end(more);                                     \
        return NEXT(name)(shown(path), flags, mode);      \
    }
OPENS(open)
OPENS(open64)

FILE *fopen(const char *path, const char *mode) { return NEXT(fopen)(shown(path), mode); }
FILE *fopen64(const char *path, const char *mode) { return NEXT(fopen64)(shown(path), mode); }

__attribute__((constructor)) static void begin(void) {
    struct sigaction own = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    if (set_real_action(SIGSEGV, &own, NULL) || syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        perror("CPUID cannot be made to fault here");
        _exit(2);
    }
}
