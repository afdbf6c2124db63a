//! The plan against published sizes, against what real caches commit, and against itself.

use lacuna_kernels::{CpuConfig, DType, ElementType};
use lacuna_kv::{KvCache, KvElements, KvPolicy};
use lacuna_models::ModelSpec;
use lacuna_models::plan::{
    Change, Demand, DraftMemory, Logits, Parts, Plan, PlanError, Rates, Residency, Verdict,
    VocabularySize, WeightMode, WeightPlan, WeightSource, request_bytes,
};
use lacuna_models::program::Program;
use lacuna_models::synth::{self, Shape};
use proptest::prelude::*;

const F16: KvElements = KvElements::both(ElementType::F16);
const F32: KvElements = KvElements::both(ElementType::F32);

/// A shape's layers and weights.
struct Subject {
    spec: ModelSpec,
    weights: WeightPlan,
}

impl Subject {
    fn named(name: &str) -> Self {
        let shape = Shape::find(name).expect("a known shape");
        let model = synth::Model::new(shape, DType::Q8_0);
        Self {
            spec: model.description().expect("a model").spec,
            weights: model.weights().expect("whole blocks"),
        }
    }

    fn plan(&self, policy: &str, elements: KvElements, demand: &Demand) -> Result<Plan, PlanError> {
        let policy: KvPolicy = policy.parse().expect("a policy");
        let cache = KvCache::new(self.spec.kv_geometry(elements)?, policy)?;
        let vocabulary = VocabularySize::usual(&self.spec);
        Plan::new(&self.spec, self.weights.clone(), vocabulary, &cache, demand)
    }
}

fn demand(context_tokens: usize) -> Demand {
    Demand {
        context_tokens,
        batch_tokens: 512,
        logits: Logits::Last,
        sequences: 1,
        draft_tokens: 0,
        draft: DraftMemory::default(),
        cpu: CpuConfig {
            threads: 2.try_into().expect("not zero"),
            ..CpuConfig::default()
        },
        weights: WeightMode::Fixed(WeightSource::Mmap),
        budget_bytes: None,
        request_bytes: None,
        image_bytes: 0,
    }
}

#[test]
fn published_kv_sizes_come_out_exactly() {
    const GIB: u64 = 1 << 30;
    for (name, context, elements, bytes) in [
        ("qwen3-0.6b", 1_024, F32, 234_881_024),
        ("qwen3-0.6b", 1_024, F16, 117_440_512),
        ("llama-3-8b", 8_192, F32, 2 * GIB),
        ("llama-3-8b", 8_192, F16, GIB),
        ("llama-3-70b", 8_192, F32, 5 * GIB),
        ("llama-3-70b", 8_192, F16, 5 * GIB / 2),
        ("llama-3-405b", 131_072, F32, 126 * GIB),
        ("llama-3-405b", 131_072, F16, 63 * GIB),
        ("qwen3-4b", 32_768, F16, 9 * GIB / 2),
        ("deepseek-v2-lite", 8_192, F16, 8_192 * 27 * 1_152),
        ("glm-4.7-flash", 8_192, F16, 8_192 * 47 * 1_152),
        ("glm-4.7-flash", 8_192, F32, 8_192 * 47 * 2_304),
    ] {
        let subject = Subject::named(name);
        for policy in ["sparse", "dense"] {
            let plan = subject
                .plan(policy, elements, &demand(context))
                .expect("it fits");
            let what = format!("{name} {policy} {elements}");
            assert_eq!(plan.kv.row_bytes(context), bytes, "{what}");
            assert_eq!(plan.kv.reserved_bytes(), bytes, "{what}: whole pages");
            assert_eq!(plan.full().parts.kv_bytes, bytes, "{what}");
        }
        let sparse = subject
            .plan("sparse", elements, &demand(context))
            .expect("it fits");
        assert_eq!(sparse.empty().parts.kv_bytes, 0, "{name}");
    }
    let qwen = Subject::named("qwen3-4b");
    let plan = qwen.plan("sparse", F16, &demand(1)).expect("it fits");
    assert_eq!(plan.kv.geometry.bytes_per_token(), 147_456);
}

/// The planned engine that these figures come from takes 966,807,552 bytes.
#[test]
fn qwen3_0_6b_at_1024_tokens_takes_under_300_megabytes_without_its_weights() {
    let qwen = Subject::named("qwen3-0.6b");
    let whole = Demand {
        batch_tokens: 1_024,
        ..demand(1_024)
    };
    let plan = qwen.plan("dense", F32, &whole).expect("it fits");
    let bytes = plan.full().parts.activation_bytes + plan.full().parts.kv_bytes;
    assert!(bytes <= 300_000_000, "{bytes}");
    assert_eq!(
        plan.arena.named("rotations").expect("a slot").bytes,
        524_288
    );
    assert_eq!(
        plan.arena.named("logits").expect("a slot").bytes,
        151_936 * 4
    );

    let every_row = Demand {
        logits: Logits::All,
        ..whole
    };
    let plan = qwen.plan("dense", F32, &every_row).expect("it fits");
    assert_eq!(
        plan.arena.named("logits").expect("a slot").bytes,
        622_329_856
    );
    let bytes = plan.full().parts.activation_bytes + plan.full().parts.kv_bytes;
    assert!(bytes < 966_807_552, "{bytes}");
}

#[test]
fn lifetimes_take_the_arena_of_every_shape_near_its_least() {
    for shape in synth::shapes() {
        let subject = Subject::named(shape.name);
        for (batch_tokens, logits) in [(1, Logits::Last), (512, Logits::Last), (64, Logits::All)] {
            let demand = Demand {
                batch_tokens,
                logits,
                ..demand(8_192)
            };
            let plan = subject.plan("sparse", F16, &demand).expect("it fits");
            assert_eq!(plan.arena.verify(&Program::new(&subject.spec)), Ok(()));
            let (bytes, least) = (plan.arena.bytes(), plan.arena.live_bytes());
            assert!(
                bytes * 100 <= least * 105,
                "{}: {bytes} of {least}",
                shape.name
            );
            assert!(bytes < plan.arena.unshared_bytes(), "{}", shape.name);
        }
    }
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let written = || {
        let plan = Subject::named("llama-3.2-1b").plan("sparse", F16, &demand(4_096));
        let plan = plan.expect("it fits");
        (format!("{plan:?}"), plan.map().to_string())
    };
    assert_eq!(written(), written());
}

/// What a map says of one section: `(offset, end, size)` of each line.
fn lines(map: &str, section: &str) -> Vec<(u64, u64, u64)> {
    let fields = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("hex");
    let rows = map.lines().map(fields).filter(|row| row[0] == section);
    rows.map(|row| (hex(&row[1]), hex(&row[2]), row[3].parse().expect("a size")))
        .collect()
}

#[test]
fn the_map_has_a_line_for_every_buffer_and_its_sections_follow_each_other() {
    let subject = Subject::named("qwen3-0.6b");
    let plan = subject
        .plan("sparse", F16, &demand(1_000))
        .expect("it fits");
    let map = plan.map().to_string();
    assert_eq!(
        map.lines().count(),
        1 + plan.arena.placements().len() + 56 + plan.weights.tensors.len()
    );
    for section in ["arena", "kv", "weights"] {
        assert!(
            lines(&map, section)
                .iter()
                .all(|(offset, end, size)| offset + size == *end)
        );
    }
    let (arena, kv, weights) = (
        lines(&map, "arena"),
        lines(&map, "kv"),
        lines(&map, "weights"),
    );
    let end = |rows: &[(u64, u64, u64)]| rows.iter().map(|row| row.1).max().unwrap_or(0);
    assert_eq!(end(&arena).next_multiple_of(64), plan.arena.bytes() as u64);
    let sum = |rows: &[(u64, u64, u64)]| rows.iter().map(|row| row.2).sum::<u64>();
    assert_eq!(sum(&kv), plan.kv.reserved_bytes());
    assert_eq!(sum(&weights), plan.weights.mapped_bytes());
    assert!(kv[0].0 >= plan.arena.bytes() as u64 && weights[0].0 >= end(&kv));
    for rows in [kv, weights] {
        assert!(
            rows.windows(2).all(|pair| pair[0].1 <= pair[1].0),
            "no two overlap"
        );
    }
}

#[test]
fn the_map_of_every_policy_adds_up_to_what_it_reserves() {
    let subject = Subject::named("qwen3-0.6b");
    for policy in [
        "sparse:interleaved=3",
        "dense:head-major",
        "grow:mlx",
        "paged",
        "paged:24",
    ] {
        let plan = subject.plan(policy, F16, &demand(1_000)).expect("it fits");
        let sizes = lines(&plan.map().to_string(), "kv")
            .into_iter()
            .map(|row| row.2);
        assert_eq!(sizes.sum::<u64>(), plan.kv.reserved_bytes(), "{policy}");
    }
}

/// Fills a real sequence of `policy` token by token and compares its report with the plan.
fn agrees(subject: &Subject, policy: &str, elements: KvElements) {
    const CONTEXT: usize = 1_200;
    let plan = subject
        .plan(policy, elements, &demand(CONTEXT))
        .expect("it fits");
    let geometry = subject.spec.kv_geometry(elements).expect("whole blocks");
    let cache = KvCache::new(geometry, policy.parse().expect("a policy"));
    let cache = cache.expect("the system has pages");
    let mut sequence = cache.sequence(CONTEXT).expect("address space");
    for tokens in 0..=CONTEXT {
        if tokens > 0 {
            sequence.prepare(1).expect("memory");
            sequence.accept(1);
        }
        let report = sequence.report();
        let found = (
            report.committed_bytes as u64,
            report.peak_committed_bytes as u64,
        );
        let planned = (plan.kv.committed_bytes(tokens), plan.kv.peak_bytes(tokens));
        assert_eq!(planned, found, "{policy} {elements} at {tokens}");
    }
    let reserved = sequence.report().reserved_bytes as u64;
    assert_eq!(plan.kv.reserved_bytes(), reserved, "{policy} {elements}");
}

/// What values are made of is part of keys, and not stored again.
#[test]
fn a_latent_row_takes_its_1152_bytes_by_the_ledger() {
    const TOKENS: usize = 4_096;
    let subject = Subject::named("deepseek-v2-lite");
    // Blocks of whole pages.
    for policy in ["sparse", "dense", "paged:512", "grow:mlx"] {
        let geometry = subject.spec.kv_geometry(F16).expect("whole blocks");
        let policy = policy.parse().expect("a policy");
        let cache = KvCache::new(geometry, policy).expect("the system has pages");
        let mut sequence = cache.sequence(TOKENS).expect("address space");
        sequence.prepare(TOKENS).expect("memory");
        sequence.accept(TOKENS);
        let committed = cache.ledger().committed.get();
        assert_eq!(committed, (TOKENS * 27 * 1_152) as u64, "{policy:?}");
    }
}

#[test]
fn a_real_cache_of_every_policy_commits_what_the_plan_says() {
    let subject = Subject::named("qwen2.5-0.5b");
    let mixed = KvElements {
        key: ElementType::Q8_0,
        value: ElementType::Q4_0,
    };
    for policy in [
        "sparse",
        "sparse:head-major",
        "sparse:interleaved=5",
        "dense",
        "dense:interleaved=24",
        "grow:mlx",
        "grow:double-linear",
        "paged",
        "grow:double-linear:512",
        "paged:40",
    ] {
        for elements in [F16, mixed] {
            agrees(&subject, policy, elements);
        }
    }
}

#[test]
fn a_budget_is_met_or_what_would_meet_it_is_named() {
    let subject = Subject::named("qwen3-0.6b");
    let demand = demand(32_768);
    let plan = |budget, context_tokens| {
        let demand = Demand {
            budget_bytes: Some(budget),
            context_tokens,
            ..demand
        };
        subject.plan("sparse", F32, &demand).expect("it fits")
    };
    let within = |budget| {
        let verdict = plan(budget, 32_768).verdict(&subject.spec, &demand);
        verdict.expect("a verdict").expect("a budget")
    };
    let needed = plan(8 << 30, 32_768).full().bytes();
    assert_eq!(within(needed), Verdict::Fits { spare: 0 });
    assert_eq!(within(needed + 5), Verdict::Fits { spare: 5 });

    let Verdict::Exceeds { excess, changes } = within(needed - 1) else {
        panic!("one byte too much")
    };
    assert_eq!(excess, 1);
    assert!(
        changes
            .iter()
            .any(|change| matches!(change, Change::Batch(_))),
        "{changes:?}"
    );

    let budget = 3 << 30;
    let Verdict::Exceeds { changes, .. } = within(budget) else {
        panic!("7 GiB of cache")
    };
    let Some(&Change::Context(longest)) = changes.first() else {
        panic!("{changes:?}")
    };
    let bytes = |context_tokens| plan(budget, context_tokens).full().bytes();
    assert!(bytes(longest) <= budget && bytes(longest + 1) > budget);

    let none = Verdict::Exceeds {
        excess: plan(10 << 20, 32_768).full().bytes() - (10 << 20),
        changes: Vec::new(),
    };
    assert_eq!(
        within(10 << 20),
        none,
        "not even the program and its vocabulary"
    );
}

#[test]
fn smaller_elements_are_proposed_where_they_are_enough() {
    let subject = Subject::named("qwen3-0.6b");
    let full = |elements, budget_bytes| {
        let demand = Demand {
            budget_bytes,
            ..demand(8_192)
        };
        let plan = subject.plan("sparse", elements, &demand).expect("it fits");
        (demand, plan)
    };
    let keys_finer = KvElements {
        key: ElementType::Q8_0,
        value: ElementType::Iq4Nl,
    };
    for enough in [F16, keys_finer] {
        let bytes = full(enough, Some(4 << 30)).1.full().bytes();
        let (demand, plan) = full(F32, Some(bytes));
        let verdict = plan.verdict(&subject.spec, &demand).expect("a verdict");
        let Some(Verdict::Exceeds { changes, .. }) = verdict else {
            panic!("more than the cache")
        };
        assert!(changes.contains(&Change::KvElements(enough)), "{changes:?}");
    }
}

#[test]
fn mapped_weights_are_beside_the_budget_and_everything_else_is_in_it() {
    let subject = Subject::named("qwen3-0.6b");
    let budget = 512 << 20;
    let demand = Demand {
        budget_bytes: Some(budget),
        ..demand(1_024)
    };
    let plan = subject.plan("sparse", F16, &demand).expect("it fits");
    let divided = plan.budget().expect("it holds the first token");
    assert_eq!(divided.mapped_weight_bytes, plan.weights.mapped_bytes());
    assert!(divided.mapped_weight_bytes > budget, "and yet it fits");
    assert_eq!(divided.parts.bytes(), budget, "the parts are the budget");
    let full = plan.full().parts;
    assert_eq!(divided.parts.besides_kv(), full.besides_kv());
    let unlimited = Demand {
        budget_bytes: None,
        ..demand
    };
    let plan = subject.plan("sparse", F16, &unlimited).expect("it fits");
    assert_eq!(plan.verdict(&subject.spec, &unlimited).expect("none"), None);
    assert_eq!(plan.budget().expect("no limit").parts.kv_bytes, u64::MAX);
}

/// A budget that was enough beside mapped weights used to be refused once weights were to be part of it.
#[test]
fn weights_are_mapped_where_a_budget_does_not_hold_what_a_pass_reads_at_once() {
    let subject = Subject::named("qwen3-0.6b");
    let plan = |weights, budget| {
        let demand = Demand {
            weights,
            budget_bytes: Some(budget),
            ..demand(1_024)
        };
        subject.plan("sparse", F16, &demand).expect("a plan")
    };
    let direct = WeightMode::Fixed(WeightSource::Direct);
    let refused = plan(direct, 200 << 20).budget().expect_err("too small");
    let least = refused.needed.bytes();
    let mapped = plan(WeightMode::Auto, 200 << 20);
    assert!(mapped.residency.is_mapped());
    mapped.budget().expect("it holds the first token");
    // What requests get grows with the budget.
    let read = plan(WeightMode::Auto, least + (64 << 20));
    assert_eq!(read.residency.source, WeightSource::Direct);
    assert!(read.residency.streamed_bytes > 0);
    read.budget().expect("it holds the first token");
}

#[test]
fn a_budget_below_the_first_token_is_refused_with_what_it_takes() {
    let subject = Subject::named("qwen3-0.6b");
    for policy in ["sparse", "dense", "paged", "grow:mlx", "grow:double-linear"] {
        let plan = |budget_bytes| {
            let demand = Demand {
                budget_bytes: Some(budget_bytes),
                ..demand(1_024)
            };
            subject.plan(policy, F16, &demand).expect("a plan")
        };
        let refused = plan(10 << 20).budget().expect_err("too small");
        assert_eq!(refused.budget, 10 << 20);
        assert!(refused.to_string().contains("vocabulary"), "{refused}");
        // What requests get grows with the budget, so the least is found where they agree.
        let mut least = refused.needed.bytes();
        for _ in 0..64 {
            least = plan(least).least().bytes();
        }
        let exact = plan(least).budget().expect("the least");
        assert_eq!(exact.parts, plan(least).least(), "{policy}");
        let less = plan(least - 1).budget().expect_err("a byte too few");
        assert!(less.needed.bytes() >= least - 1, "{policy}");
        // Whoever follows the advice is not refused again, and was not told of much more than it takes.
        let advised = refused.needed.bytes();
        assert!((least..least + 16).contains(&advised), "{policy}");
        plan(advised).budget().expect("what the refusal asks for");
        let told = refused.to_string();
        let (_, told) = told.split_once("needs ").expect("what it needs");
        let (mebibytes, _) = told.split_once(" MiB").expect("in MiB");
        let tenths: u64 = mebibytes.replace('.', "").parse().expect("one decimal");
        assert!(tenths * (1 << 20) >= 10 * least, "{policy}: {told}");
    }
}

#[test]
fn tables_for_grammars_are_told_and_not_planned() {
    let subject = Subject::named("qwen3-0.6b");
    let plan = subject.plan("sparse", F16, &demand(1_024)).expect("a plan");
    assert!(plan.program.constraint_bytes >= 250 * 151_936);
    assert_eq!(plan.least().constraint_bytes, 0);
    assert_eq!(plan.full().parts.constraint_bytes, 0);
}

#[test]
fn what_an_image_takes_is_beside_the_share_of_requests() {
    let subject = Subject::named("qwen3-0.6b");
    let plan = |budget_bytes| {
        let demand = Demand {
            budget_bytes: Some(budget_bytes),
            image_bytes: 30 << 20,
            ..demand(1_024)
        };
        subject.plan("sparse", F16, &demand).expect("a plan")
    };
    let refused = plan(10 << 20).budget().expect_err("too small");
    let advised = plan(refused.needed.bytes());
    assert_eq!(
        advised.request_bytes,
        request_bytes(advised.budget_bytes) + (30 << 20)
    );
    advised.budget().expect("what the refusal asks for");
}

#[test]
fn requests_get_an_eighth_within_bounds() {
    assert_eq!(request_bytes(Some(1 << 20)), 2 << 20);
    assert_eq!(request_bytes(Some(64 << 20)), 8 << 20);
    assert_eq!(request_bytes(Some(1 << 40)), 64 << 20);
    assert_eq!(request_bytes(None), 64 << 20);
}

proptest! {
    #[test]
    fn a_divided_budget_adds_up_and_more_of_it_never_leaves_less_for_kv(
        budget in 100u64 << 20..1 << 40, more in 0u64..1 << 30, context in 1usize..8_192,
        sequences in 1usize..64, threads in 1usize..32, batch in 1usize..512,
    ) {
        let subject = Subject::named("qwen3-0.6b");
        let parts = |budget_bytes| -> Option<Parts> {
            let demand = Demand {
                context_tokens: context,
                batch_tokens: batch,
                sequences,
                draft_tokens: 0,
                draft: DraftMemory::default(),
                cpu: CpuConfig {
                    threads: threads.try_into().expect("one at least"),
                    ..CpuConfig::default()
                },
                weights: WeightMode::Fixed(WeightSource::Mmap),
                budget_bytes: Some(budget_bytes),
                request_bytes: None,
                image_bytes: 0,
                logits: Logits::Last,
            };
            let plan = subject.plan("sparse", F16, &demand).expect("a plan");
            plan.budget().ok().map(|budget| budget.parts)
        };
        if let Some(found) = parts(budget) {
            prop_assert_eq!(found.bytes(), budget);
            let richer = parts(budget + more).expect("more is enough too");
            prop_assert!(richer.kv_bytes >= found.kv_bytes);
            prop_assert!(richer.request_bytes >= found.request_bytes);
        }
    }
}

#[test]
fn demands_that_nothing_can_meet_name_the_limit() {
    let subject = Subject::named("qwen3-0.6b");
    let refused = |demand: Demand| {
        let error = subject
            .plan("sparse", F16, &demand)
            .expect_err("nothing can meet it");
        error.to_string()
    };
    assert!(refused(demand(0)).contains("context"));
    assert!(
        refused(Demand {
            batch_tokens: 0,
            ..demand(10)
        })
        .contains("batch")
    );
    assert!(
        refused(Demand {
            sequences: 0,
            ..demand(10)
        })
        .contains("sequence")
    );
    assert!(refused(demand(1 << 40)).contains("address space"));
    assert!(refused(demand(usize::MAX)).contains("address space"));
    let many = Demand {
        sequences: usize::MAX,
        ..demand(1 << 20)
    };
    assert!(refused(many).contains("address space"));
}

#[test]
fn a_token_takes_the_longer_of_what_it_reads_and_what_passes_memory() {
    let Subject { weights, .. } = Subject::named("qwen3-0.6b");
    let all = Residency::plan(&weights, WeightSource::Direct, None);
    let half = Residency::plan(&weights, WeightSource::Direct, Some(all.memory_bytes() / 2));
    assert!(half.streamed_bytes > 100_000_000);
    let active = 600_000_000;
    let takes = |plan: &Residency, memory, disk| {
        plan.seconds_per_token(active, Rates { memory, disk }, None)
    };
    assert_eq!(takes(&all, 30_000_000_000, 1), 0.02);
    let streamed = half.streamed_bytes as f64;
    assert_eq!(takes(&half, 30_000_000_000, 1_000_000), streamed / 1e6);
    // What comes from the disk is written to memory, and then computed with.
    let passing = active as f64 + streamed;
    assert_eq!(takes(&half, 1_000_000, 30_000_000_000), passing / 1e6);
}
