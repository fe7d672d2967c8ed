"""Reading compiled programs: loops, bytes, collectives, cycles. Small hand-written modules whose
numbers can be added up by eye, and one program from the compiler of this machine."""

import jax
import jax.numpy as jnp
import pytest

from bertjax.tools.plan import hlo

# A loop of 12 turns over a fusion of 100 cycles and an all-reduce; 7 cycles outside of it.
LOOP = """
HloModule jit__lambda, is_scheduled=true

%fused (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %n = f32[8,128]{1,0:T(8,128)} negate(%p), backend_config={"estimated_cycles":"999"}
}

%cond (s: (s32[], f32[8,128])) -> pred[] {
  %s = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(LIMIT)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=DIRECTION
}

%body (t: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %t = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%t), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%t), index=1
  %y = f32[8,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  %z = f32[8,128]{1,0:T(8,128)} all-reduce(%y), replica_groups=[2,8]<=[16], to_apply=%add
  %one = s32[] constant(1)
  %k = s32[] add(%j, %one)
  ROOT %r = (s32[], f32[8,128]) tuple(%k, /*index=1*/%z)
}

ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start = s32[] constant(START)
  %init = (s32[], f32[8,128]) tuple(%start, %a)
  %while.1 = (s32[], /*index=1*/f32[8,128]) while(%init), condition=%cond, body=%body
  %out = f32[8,128]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
  ROOT %c = f32[8,128]{1,0:T(8,128)} copy(%out), backend_config={"estimated_cycles":"7"}
}
"""


def loop(limit=12, start=0, direction="LT"):
    text = LOOP.replace("LIMIT", str(limit)).replace("START", str(start))
    return hlo.Program(text.replace("DIRECTION", direction))


def test_cycles_of_a_loop_body_count_as_often_as_it_runs_and_fused_ones_do_not():
    assert loop().cycles() == 12 * 100 + 7


@pytest.mark.parametrize(
    "limit, start, direction, trips",
    [(12, 0, "LT", 12), (12, 2, "LT", 10), (12, 0, "LE", 13), (0, 0, "LT", 0), (12, 0, "GT", None)],
)
def test_the_trip_count_is_read_from_condition_and_initial_value(limit, start, direction, trips):
    assert loop(limit, start, direction).loops == {"while.1": trips}


def test_a_trip_count_that_the_compiler_wrote_down_wins():
    text = (
        LOOP.replace("LIMIT", "12")
        .replace("START", "0")
        .replace("DIRECTION", "GT")
        .replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    )
    assert hlo.Program(text).loops == {"while.1": 5}


def test_collectives_are_added_up_over_the_loop():
    assert loop().collectives(16) == [hlo.Collective("all-reduce", 12, 12 * 4096, 8, False)]


def test_asynchronous_collectives_count_by_their_result():
    program = hlo.Program("""
ENTRY %main (a: bf16[4,8]) -> bf16[16,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %s = (bf16[4,8]{1,0}, bf16[16,8]{1,0:T(8,128)(2,1)}) all-gather-start(%a), \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %d = bf16[16,8]{1,0} all-gather-done(%s)
}
""")
    assert program.collectives(8) == [hlo.Collective("all-gather", 1, 256, 4, True)]


@pytest.mark.parametrize(
    "attributes, size",
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}, x", 8),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", 2),
        ("replica_groups={}", 16),
    ],
)
def test_group_sizes_in_every_notation(attributes, size):
    assert hlo.group_size(attributes, 16) == size


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[]", 4),
        ("bf16[12,768,3072]{2,1,0:T(8,128)(2,1)S(1)}", 12 * 768 * 3072 * 2),
        ("(s32[2]{0}, /*index=1*/pred[8]{0:T(512)})", 16),
        ("u32[<=4,2]", 32),
        ("token[]", 0),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert sum(hlo.array_bytes(shape)) == size


def test_hbm_traffic_counts_slices_not_the_arrays_that_they_are_cut_from():
    program = hlo.Program("""
%cut (p: f32[12,1024], i: s32[]) -> f32[1,1024] {
  %p = f32[12,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %s = f32[1,1024]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,1024}
}

%put (q: f32[12,1024], u: f32[1,1024], j: s32[]) -> f32[12,1024] {
  %q = f32[12,1024]{1,0} parameter(0)
  %u = f32[1,1024]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %nil = s32[] constant(0)
  ROOT %d = f32[12,1024]{1,0} dynamic-update-slice(%q, %u, %j, %nil)
}

ENTRY %main (a: f32[12,1024], n: s32[]) -> f32[12,1024] {
  %a = f32[12,1024]{1,0} parameter(0)
  %n = s32[]{:T(128)S(6)} parameter(1)
  %x = f32[1,1024]{1,0} fusion(%a, %n), kind=kLoop, calls=%cut
  %y = f32[1,1024]{1,0:T(8,128)S(1)} negate(%x)
  ROOT %z = f32[12,1024]{1,0} fusion(%a, %y, %n), kind=kLoop, calls=%put
}
""")
    row = 4096
    # cut: reads and writes a row; negate: reads one, writes on-chip; put: writes one.
    assert program.hbm_bytes() == 2 * row + row + row


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.Program("HloModule x\n")


def test_the_loop_of_a_scan_compiled_here_has_its_length():
    def run(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, None), x, None, length=17)[0]

    text = jax.jit(run).lower(jnp.ones((32, 32))).compile().as_text()
    assert list(hlo.Program(text).loops.values()) == [17]
