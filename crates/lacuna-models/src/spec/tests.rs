//! Specs that contradict themselves are refused, with the field and the layer named.

use std::num::NonZeroUsize;

use lacuna_kernels::ElementType;

use super::examples::{EXPERTS, latent, small};
use super::*;
use crate::error::ConfigError;

fn message(spec: &ModelSpec) -> String {
    spec.validate()
        .expect_err("it contradicts itself")
        .to_string()
}

#[test]
fn a_small_model_is_one() {
    small().validate().expect("it holds together");
}

#[test]
fn zero_and_absurd_sizes_are_named() {
    let layers = Vec::new();
    assert!(message(&ModelSpec { layers, ..small() }).contains("layers"));
    let vocabulary = usize::MAX;
    let huge = ModelSpec {
        vocabulary,
        ..small()
    };
    assert!(message(&huge).contains("vocabulary"));
    let narrow = small().each_layer(|layer| layer.gated().inner = 0);
    assert!(message(&narrow).contains("feed_forward"));
}

#[test]
fn what_a_usual_model_leaves_to_be_said_is_refused_if_it_is_not() {
    type Leave = fn(&mut ModelSpec, ModelSpec);
    let usual = || ModelSpec::usual("usual", small().output);
    let parts: [(&str, Leave); 5] = [
        ("hidden", |spec, usual| spec.hidden = usual.hidden),
        ("vocabulary", |spec, usual| {
            spec.vocabulary = usual.vocabulary
        }),
        ("context", |spec, usual| {
            spec.context_tokens = usual.context_tokens
        }),
        ("epsilon", |spec, usual| spec.norm = usual.norm),
        ("layers", |spec, usual| spec.layers = usual.layers),
    ];
    for (part, leave) in parts {
        let mut spec = small();
        leave(&mut spec, usual());
        assert!(message(&spec).contains(part), "{part}");
    }
}

#[test]
fn heads_that_do_not_group_are_refused() {
    let odd = small().each_layer(|layer| layer.attention_mut().query_heads = 5);
    assert!(matches!(
        odd.validate(),
        Err(ConfigError::HeadGrouping { .. })
    ));
    let mut odd = small();
    odd.ropes[0].dimensions = 31;
    assert!(matches!(
        odd.validate(),
        Err(ConfigError::OddHeadDim { head_dim: 31 })
    ));
}

#[test]
fn a_layer_that_differs_is_named() {
    let mut odd = small();
    odd.layers[1].attention_mut().kv_heads = 4;
    assert!(message(&odd).starts_with("layer 1: "), "{}", message(&odd));
}

#[test]
fn rotations_that_do_not_fit_their_heads_are_refused() {
    let mut wide = small();
    wide.ropes[0].dimensions = 34;
    assert!(message(&wide).contains("rotated elements"));
    let missing = small().each_layer(|layer| layer.attention_mut().rope = Some(1));
    assert!(message(&missing).contains("number of the rotary embedding"));
    let mut table = small();
    table.ropes[0].scaling = RopeScaling::LongRope(LongRope {
        original_context: 16,
        attention_factor: 1.0,
        factors: Some(LongRopeFactors {
            short: vec![1.0; 16],
            long: vec![1.0; 15],
        }),
    });
    assert!(message(&table).contains("15 entries, expected 16"));
}

#[test]
fn constants_must_be_positive_and_finite() {
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut broken = small();
        broken.norm.epsilon = bad;
        assert!(matches!(
            broken.validate(),
            Err(ConfigError::NotPositive { .. })
        ));
    }
    let mut broken = small();
    broken.ropes[0].scaling = RopeScaling::Linear { factor: 0.0 };
    assert!(broken.validate().is_err());
}

#[test]
fn contradictions_of_streams_and_learned_residuals_are_named_with_their_layer() {
    for streams in [0, 5, usize::MAX] {
        let altup = Some(AltUp { streams });
        assert!(message(&ModelSpec { altup, ..small() }).contains("residual streams"));
    }
    let mut normless = small();
    normless.layers[2].laurel = Some(Laurel { rank: 8 });
    normless.validate().expect("there is a norm before");
    normless.layers[2].norms = Norms::After;
    let shown = message(&normless);
    assert!(
        shown.starts_with("layer 2: ") && shown.contains("a norm before attention"),
        "{shown}"
    );
    for rank in [0, 97] {
        let mut wide = small();
        wide.layers[1].laurel = Some(Laurel { rank });
        let shown = message(&wide);
        assert!(
            shown.starts_with("layer 1: ") && shown.contains("rank"),
            "{shown}"
        );
    }
    for cutoff in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut sparse = small();
        sparse.layers[1].gated().gate_cutoff = Some(cutoff);
        let shown = message(&sparse);
        assert!(
            shown.starts_with("layer 1: ") && shown.contains("sparse gates"),
            "{shown}"
        );
    }
}

#[test]
fn a_window_is_how_long_rows_are_kept() {
    let window = NonZeroUsize::new(9).expect("nine");
    let spec = small().each_layer(|layer| layer.attention_mut().mask = Mask::Window(window));
    let keep = |spec: &ModelSpec| match spec.layers[0]
        .attention
        .as_ref()
        .expect("attention")
        .cache()
    {
        LayerCache::Rows(rows) => rows.keep,
        other => panic!("{other:?}"),
    };
    assert_eq!(keep(&spec), Keep::Window(window));
    assert_eq!(keep(&small()), Keep::All);
    let chunks = small().each_layer(|layer| layer.attention_mut().mask = Mask::Chunk(window));
    for position in 0..40 {
        let held = keep(&chunks).first_seen(position);
        assert!(held <= Mask::Chunk(window).first_row(position));
        assert!(position - held < window.get());
    }
}

#[test]
fn latent_rows_are_kept_once() {
    let spec = latent();
    spec.validate().expect("latent attention");
    let LayerCache::Rows(rows) = spec.layers[0]
        .attention
        .as_ref()
        .expect("attention")
        .cache()
    else {
        panic!("rows of its own");
    };
    assert_eq!(
        (rows.kv_heads, rows.key_dim, rows.value_dim),
        (1, 32, 24),
        "{rows:?}"
    );
    assert_eq!(rows.values, ValueRows::InKeys);
}

#[test]
fn values_that_are_part_of_keys_have_no_type_of_their_own() {
    let mixed = KvElements {
        key: ElementType::F32,
        value: ElementType::F16,
    };
    let refused = latent().kv_geometry(mixed).expect_err("one row, one type");
    assert!(
        matches!(refused, KvError::OneElement { .. }) && refused.to_string().contains("`f32`"),
        "{refused}"
    );
    small().kv_geometry(mixed).expect("rows of either kind");
}

#[test]
fn contradictions_of_latent_rows_are_named() {
    let with = |change: fn(&mut Latent)| {
        message(&latent().each_layer(|layer| {
            change(layer.attention_mut().latent.as_mut().expect("latent rows"));
        }))
    };
    assert!(with(|latent| latent.rank = 0).contains("rank of latent rows"));
    assert!(with(|latent| latent.key_dim = 0).contains("head's keys"));
    assert!(with(|latent| latent.value_dim = 0).contains("head's values"));
    assert!(with(|latent| latent.value_dim = 1 << 20).contains("head's values"));
    assert!(with(|latent| latent.query_rank = Some(0)).contains("rank of queries"));
    assert!(with(|latent| latent.rank = 23).contains("not 1 of 32"));

    let with = |change: fn(&mut Attention)| {
        message(&latent().each_layer(|layer| change(layer.attention_mut())))
    };
    for rows in [
        with(|attention| attention.kv_heads = 2),
        with(|attention| attention.head_dim = 24),
        with(|attention| attention.rope = None),
    ] {
        assert!(rows.contains("latent rows are one head"), "{rows}");
    }
    for other in [
        with(|attention| attention.sinks = true),
        with(|attention| attention.value_norm = true),
        with(|attention| attention.values = Values::Keys),
        with(|attention| attention.qk_norm = Some(QkNorm::Whole)),
    ] {
        assert!(other.contains("without those"), "{other}");
    }
}

/// A decoder whose second layer keeps a state instead of rows.
fn with_state(change: impl Fn(&mut DeltaNet)) -> ModelSpec {
    let mut net = DeltaNet {
        key_heads: 2,
        value_heads: 4,
        key_dim: 24,
        value_dim: 20,
        taps: 4,
        order: KeyHeads::Tiled,
        inputs: InputsIn::Apart,
        gates: GatesIn::Apart,
    };
    change(&mut net);
    let mut spec = small();
    spec.layers[1].attention = None;
    spec.layers[1].recurrence = Some(Recurrence::DeltaNet(net));
    spec
}

#[test]
fn a_layer_with_a_state_has_room_for_whole_vectors_of_it_and_no_rows() {
    let spec = with_state(|_| ());
    spec.validate().expect("a model");
    let channels = (2 * 2 * 24 + 4 * 20usize).next_multiple_of(16);
    let states = [0, 3 * channels + 4 * 24 * 32, 0];
    assert!(spec.states().eq(states));
    let geometry = spec
        .kv_geometry(KvElements::both(ElementType::F16))
        .expect("rows and a state");
    let kept = [0, 1, 2].map(|layer| geometry.state_elements(Layer(layer)));
    assert_eq!(kept, states);
    assert_eq!(geometry.own_rows().count(), 2);
    assert_eq!(spec.state_macs(), 4 * (2 * 48 + 80) + 3 * 80 * 24);
}

#[test]
fn contradictions_of_states_are_named() {
    let with = |change: fn(&mut DeltaNet)| message(&with_state(change));
    for (said, expected) in [
        (with(|net| net.key_heads = 0), "key heads of a state"),
        (
            with(|net| net.value_heads = 1 << 30),
            "value heads of a state",
        ),
        (with(|net| net.key_heads = 3), "share 3 key heads evenly"),
        (with(|net| net.key_dim = 0), "elements of a head of a state"),
        (
            with(|net| net.value_dim = 1 << 40),
            "elements of a head of a state",
        ),
        (with(|net| net.taps = 1), "a convolution sees"),
        (with(|net| net.taps = 5), "a convolution sees"),
    ] {
        assert!(
            said.contains(expected) && said.contains("layer 1"),
            "{said}"
        );
    }
    let mut spec = with_state(|_| ());
    spec.layers[1].norms = Norms::After;
    assert!(message(&spec).contains("a norm before it"));
}

#[test]
fn time_steps_and_scales_of_states_that_are_none_are_named() {
    let with = |change: fn(&mut Mamba2)| {
        let mut mamba = Mamba2 {
            heads: 4,
            head_dim: 16,
            groups: 2,
            state_dim: 12,
            taps: 4,
            norm: StateNorm::AfterGate,
            time_steps: TimeStepLimits::new(0.0, f32::INFINITY),
            input_scales: None,
        };
        change(&mut mamba);
        let mut spec = small();
        spec.layers[1].recurrence = Some(Recurrence::Mamba2(mamba));
        spec.validate()
    };
    with(|_| ()).expect("attention and a state side by side");
    with(|mamba| mamba.time_steps = TimeStepLimits::new(0.5, 0.5)).expect("all the same");
    for refused in [
        with(|mamba| mamba.time_steps = TimeStepLimits::new(-1.0, 1.0)),
        with(|mamba| mamba.time_steps = TimeStepLimits::new(0.5, 0.4)),
        with(|mamba| mamba.time_steps = TimeStepLimits::new(f32::NAN, 1.0)),
        with(|mamba| mamba.time_steps = TimeStepLimits::new(0.0, f32::NAN)),
        with(|mamba| mamba.time_steps = TimeStepLimits::new(0.0, 0.0)),
        with(|mamba| mamba.time_steps = TimeStepLimits::new(f32::INFINITY, f32::INFINITY)),
    ] {
        let shown = refused.expect_err("no time steps").to_string();
        assert!(
            shown.starts_with("layer 1: ") && shown.contains("time_step_limit"),
            "{shown}"
        );
    }
    let shown = with(|mamba| mamba.input_scales = Some([1.0, 1.0, f32::NAN, 1.0, 1.0]));
    let shown = shown.expect_err("no scale").to_string();
    assert!(shown.contains("scale of a state's inputs"), "{shown}");
    let shown = with(|mamba| mamba.groups = 3)
        .expect_err("uneven")
        .to_string();
    assert!(shown.contains("share 3 key heads evenly"), "{shown}");
}

/// What is said of experts that `change` has made wrong, in the second layer alone.
fn message_of_experts(change: impl Fn(&mut Experts)) -> String {
    let mut spec = small();
    let mut experts = EXPERTS;
    change(&mut experts);
    spec.layers[1].feed_forward = FeedForward::Experts(experts);
    message(&spec)
}

#[test]
fn contradictions_of_experts_are_named_with_their_layer() {
    let sound = small().each_layer(|layer| layer.feed_forward = FeedForward::Experts(EXPERTS));
    sound.validate().expect("a mixture");
    let groups = |experts: &mut Experts, count, used| {
        let score = GroupScore::Largest;
        experts.routing.groups = Some(Groups { count, used, score });
    };
    let cases = [
        (
            "experts is 0",
            message_of_experts(|e| e.routing.experts = 0),
        ),
        (
            "experts is",
            message_of_experts(|e| e.routing.experts = usize::MAX),
        ),
        (
            "experts of a token is 0",
            message_of_experts(|e| e.routing.used = 0),
        ),
        (
            "experts of a token is 9",
            message_of_experts(|e| e.routing.used = 9),
        ),
        // Two groups of two have four.
        (
            "experts of a token is 5",
            message_of_experts(|e| e.routing.used = 5),
        ),
        ("into 3 groups", message_of_experts(|e| groups(e, 3, 1))),
        (
            "groups of experts is 0",
            message_of_experts(|e| groups(e, 0, 1)),
        ),
        (
            "groups of experts is 65",
            message_of_experts(|e| groups(e, 65, 1)),
        ),
        (
            "groups of a token is 0",
            message_of_experts(|e| groups(e, 4, 0)),
        ),
        (
            "groups of a token is 5",
            message_of_experts(|e| groups(e, 4, 5)),
        ),
        (
            "feed_forward of experts",
            message_of_experts(|e| e.inner = 0),
        ),
        (
            "scale of experts",
            message_of_experts(|e| e.routing.scale = f32::NAN),
        ),
        (
            "feed_forward of shared experts",
            message_of_experts(|e| {
                e.shared = Some(SharedExpert {
                    inner: 0,
                    gated: false,
                });
            }),
        ),
        (
            "width of what experts read",
            message_of_experts(|e| e.latent = Some(0)),
        ),
        (
            "limit of gates",
            message_of_experts(|e| {
                e.block = ExpertBlock::Gated(Gating::Clamped {
                    alpha: 1.0,
                    limit: 0.0,
                });
            }),
        ),
    ];
    for (expected, shown) in cases {
        assert!(
            shown.starts_with("layer 1: ") && shown.contains(expected),
            "{shown}, not {expected}"
        );
    }
}
