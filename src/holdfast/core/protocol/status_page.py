"""Layout of the shared-memory status page: names and bit packing. ``runtime/node/status_page.py`` maps the page.

Theory. Each worker has one page, a file in shared memory that outlives the process. The worker writes single aligned
64-bit words (one store each, so a reader never sees half a word). Agent, status command and fault injector read them.
Step and phase share one word, so that a reader always gets both from the same moment.

Invariants:
1. The word ``STATE`` shows the phase UPDATE of step s before a parameter changes in step s. It shows READY of step s+1
   only after the block of step s has ended.
2. A reader trusts a page only when ``GENERATION`` equals the generation that the reader decides about.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

PAGE_MAGIC = 0x484F4C4446415354  # "HOLDFAST"
PAGE_VERSION = 4
PAGE_SIZE_BYTES = 4096
SECTION_SIZE_BYTES = 64
LOCK_AT = 512  # a pthread_mutex_t, see death_watch.py
LOCK_SIZE_BYTES = 64
OUTSIDE_AT = 1024  # two words: length, number of collectives; then ``OutsideCollectives`` in JSON
OUTSIDE_SIZE_BYTES = 2048
LOCAL_SLOTS = 2
LOCAL_SLOT_BYTES = 128 * 1024
FLIGHT_SLOTS = 64  # the last collectives of the process
# number in its group, begun, ended (CLOCK_MONOTONIC; 0: not yet, below 0: broken), count, text
FLIGHT_SLOT_BYTES = 128
FLIGHT_AT = PAGE_SIZE_BYTES + LOCAL_SLOTS * LOCAL_SLOT_BYTES
FILE_SIZE_BYTES = FLIGHT_AT + FLIGHT_SLOTS * FLIGHT_SLOT_BYTES


class Word(IntEnum):
    """Index of each 64-bit word of the status page."""

    MAGIC = 0
    VERSION = 1
    GENERATION = 2
    MEMBER = 3
    RANK = 4
    PID = 5
    STATE = 6  # step << 8 | Phase
    ENTERED_NS = 7  # CLOCK_MONOTONIC when STATE was written
    COLLECTIVES = 8  # collectives started in this process
    COMMITTED = 9  # steps committed
    STEP_NS = 10  # duration of the last committed step
    FREED_NS = 11  # CLOCK_MONOTONIC when the process was out of its collectives after a fence
    TRAP = 12  # drill only: action << 56 | phase << 48 | step; 0 = none (see pack_trap)
    FLAGS = 13  # bits of PageFlag
    REPEATED = 14  # blocks that ran again after an abort
    # Newest step whose share the writer process has: it is saved even if this process ends; 0: none.
    STAGED = 15
    WORK = 16  # bytes of state moved in a recovery; only a change of the value means something
    FENCED = 17  # generation of the fence that holds this process; 0: none
    DUE = 18  # 1: ordered to continue in place, and the main thread has not continued yet
    SEQUENCE = 24  # collectives started since the block of this step began
    USUAL_SEQUENCE = 25  # value of SEQUENCE at the vote of the last committed step
    BUSY_NS = 26  # duration of the last committed step from its start to its vote, without waits for peers
    ARRIVED = 27  # digest of the newest state in memory that another node also has; 0: none
    DONE = 28  # steps committed by this process
    SPRUNG_NS = 29  # drill only: CLOCK_MONOTONIC when the process found its trap
    SECTION = 32  # name of the announced section: SECTION_SIZE_BYTES of UTF-8 from here, padded with zeros


class Phase(IntEnum):
    """Phase of a worker, as its status page shows it. A state of the step protocol has one or several phases.

    MEET, FORWARD and BACKWARD belong to state ``compute``, UPDATE and COMMIT to ``updating``, READY and SAVE to
    ``ready``.
    """

    STARTING = 0
    READY = 1
    FORWARD = 2
    BACKWARD = 3
    VOTE = 4
    UPDATE = 5
    COMMIT = 6
    SAVE = 7
    ABORTED = 8
    IN_DOUBT = 9
    TORN = 10
    FINISHED = 11
    LEFT = 12
    LOADING = 20  # drawing a batch
    SECTION = 21  # in a section that the script announced
    SPARE = 22  # the process is a spare that waits to be called
    AFTER = 23  # its session and the training of all ranks are over; the script still runs
    MEET = 24  # meets the other ranks before a block


class PageFlag(IntFlag):
    """Bits of the word ``FLAGS`` on the status page of a worker."""

    STACKS = 1  # STACKS_SIGNAL makes this process write its stacks
    COMPILING = 2
    MEETS = 4  # waits between two steps for an agreement of all ranks
    LEFT = 8  # its script has left its loops: the session is about to end


class TrapAction(IntEnum):
    """The effect of a trap, set by a drill, on the worker that reaches the phase and step of the trap."""

    NONE = 0
    HOLD = 1  # stop at the trap until an injector kills the process
    RAISE = 2  # raise an ordinary exception in the main thread
    EXIT = 3  # os._exit(1)
    LOOP = 4  # spin in Python for ever
    GIL = 5  # block in C for ever and hold the GIL
    DEADLOCK = 6  # start a collective that no other rank starts
    WAIT = 7  # block for ever in an ordinary wait (a stuck loader)
    FLIP = 8  # flip one bit of a weight
    FLIP_STATE = 9  # flip one bit of the optimizer's state


def pack_state(step: int, phase: Phase) -> int:
    """Return ``step`` and ``phase`` packed into one 64-bit word."""
    return (step << 8) | int(phase)


def unpack_state(word: int) -> tuple[int, Phase]:
    """Return the step and the phase that :func:`pack_state` packed into ``word``."""
    return word >> 8, Phase(word & 0xFF)


EPOCH_END = 0xFF
"""In a trap, in the place of a phase: the script has ended its loop over the steps of an epoch."""


def pack_trap(action: TrapAction, phase: int, step: int) -> int:
    """Return the trap of a drill packed into one word.

    Args:
        action: the effect of the trap, less than 2**7.
        phase: a :class:`Phase`, or :data:`EPOCH_END`.
        step: the step, less than 2**48.
    """
    return (int(action) << 56) | (int(phase) << 48) | step


def unpack_trap(word: int) -> tuple[TrapAction, int, int]:
    """Return the action, phase and step that :func:`pack_trap` packed into ``word``."""
    return TrapAction(word >> 56), (word >> 48) & 0xFF, word & 0xFFFFFFFFFFFF
