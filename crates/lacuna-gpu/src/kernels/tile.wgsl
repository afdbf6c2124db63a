// The kernel for many tokens and quantized weights: 64 rows and 64 tokens to a workgroup, four of each to a thread, whose
// bytes are brought to shared memory four units at a time. Units come in the order of the lanes that have them.

const THREADS = 256u;
const STAGE = 4u;

// Bytes of unit `u` of row or token `i`: the halves at `(2 u + half) TILE + i`.
var<workgroup> weight_bytes: array<vec4<u32>, 512>;
var<workgroup> input_bytes: array<vec4<u32>, 512>;
// What the halves of a weight's unit are worth, and its minimum.
var<workgroup> weight_scales: array<vec2<f32>, 256>;
var<workgroup> weight_minima: array<f32, 256>;
// What a token's unit is worth, and the sum of its bytes.
var<workgroup> input_scales: array<vec2<f32>, 256>;

// Four rows of one unit.
struct Four {
    a: Unit,
    b: Unit,
    c: Unit,
    d: Unit,
}

fn staged(unit: u32, row: u32) -> Unit {
    let at = 2u * unit * TILE + row;
    let number = unit * TILE + row;
    return Unit(weight_bytes[at], weight_bytes[at + TILE], weight_scales[number], weight_minima[number]);
}

fn staged_input(unit: u32, token: u32) -> Input {
    let at = 2u * unit * TILE + token;
    let scales = input_scales[unit * TILE + token];
    return Input(input_bytes[at], input_bytes[at + TILE], scales.x, bitcast<i32>(scales.y));
}

fn add_rows(sums: vec4<f32>, four: Four, input: Input) -> vec4<f32> {
    return vec4<f32>(
        add(sums.x, four.a, input),
        add(sums.y, four.b, input),
        add(sums.z, four.c, input),
        add(sums.w, four.d, input),
    );
}

// A lane and how many units are before one, counted from the lane's first: of the lane that the unit is in.
fn in_lane(place: vec2<u32>, least: u32, longer: u32) -> vec2<u32> {
    var lane = place.x;
    var before = place.y;
    loop {
        let units = least + select(0u, 1u, lane < longer);
        if before < units || lane == LANES {
            break;
        }
        before -= units;
        lane += 1u;
    }
    return vec2<u32>(lane, before);
}

@compute @workgroup_size(THREADS)
fn tile(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let row = group.x * TILE;
    let own_share = share(group.y, TILE);
    let first = own_share.x;
    let count = own_share.y;
    if count == 0u {
        return;
    }
    begin(thread);
    // What this thread brings: a row and a token of one unit in four. Beyond the last, the last again.
    let own = thread % TILE;
    let own_unit = thread / TILE;
    let own_row = place_of(min(row + own, p.count - 1u));
    let own_token = input_row(first + min(own, count - 1u));
    // And what it computes: every sixteenth of each.
    let in_rows = thread % 16u;
    let in_tokens = thread / 16u;
    // The first lanes have one unit more than the others.
    let least = p.units / LANES;
    let longer = p.units % LANES;
    var lane = 0u;
    var left = least + select(0u, 1u, longer > 0u);

    var all_a = vec4<f32>();
    var all_b = vec4<f32>();
    var all_c = vec4<f32>();
    var all_d = vec4<f32>();
    var sum_a = vec4<f32>();
    var sum_b = vec4<f32>();
    var sum_c = vec4<f32>();
    var sum_d = vec4<f32>();
    // What this thread brings is asked for while the units before it are added.
    var place = in_lane(vec2<u32>(0u, own_unit), least, longer);
    var unit_ahead = Unit();
    var input_ahead = Input();
    if own_unit < p.units {
        unit_ahead = load(own_row, place.y * LANES + place.x);
        input_ahead = input_of(own_token, place.y * LANES + place.x);
    }
    for (var start = 0u; start < p.units; start += STAGE) {
        let at = 2u * own_unit * TILE + own;
        weight_bytes[at] = unit_ahead.low;
        weight_bytes[at + TILE] = unit_ahead.high;
        weight_scales[thread] = unit_ahead.scales;
        weight_minima[thread] = unit_ahead.minimum;
        input_bytes[at] = input_ahead.low;
        input_bytes[at + TILE] = input_ahead.high;
        input_scales[thread] = vec2<f32>(input_ahead.scale, bitcast<f32>(input_ahead.sum));
        place = in_lane(vec2<u32>(place.x, place.y + STAGE), least, longer);
        let number = place.y * LANES + place.x;
        workgroupBarrier();
        if start + STAGE + own_unit < p.units {
            unit_ahead = load(own_row, number);
            input_ahead = input_of(own_token, number);
        }
        for (var unit = 0u; unit < STAGE; unit++) {
            if start + unit < p.units {
                let four = Four(
                    staged(unit, in_rows),
                    staged(unit, in_rows + 16u),
                    staged(unit, in_rows + 32u),
                    staged(unit, in_rows + 48u),
                );
                sum_a = add_rows(sum_a, four, staged_input(unit, in_tokens));
                sum_b = add_rows(sum_b, four, staged_input(unit, in_tokens + 16u));
                sum_c = add_rows(sum_c, four, staged_input(unit, in_tokens + 32u));
                sum_d = add_rows(sum_d, four, staged_input(unit, in_tokens + 48u));
                left -= 1u;
                if left == 0u {
                    all_a += sum_a;
                    all_b += sum_b;
                    all_c += sum_c;
                    all_d += sum_d;
                    sum_a = vec4<f32>();
                    sum_b = vec4<f32>();
                    sum_c = vec4<f32>();
                    sum_d = vec4<f32>();
                    lane += 1u;
                    left = least + select(0u, 1u, lane < longer);
                }
            }
        }
        workgroupBarrier();
    }
    leave_rows(first, in_tokens, count, row + in_rows, all_a);
    leave_rows(first, in_tokens + 16u, count, row + in_rows, all_b);
    leave_rows(first, in_tokens + 32u, count, row + in_rows, all_c);
    leave_rows(first, in_tokens + 48u, count, row + in_rows, all_d);
}
