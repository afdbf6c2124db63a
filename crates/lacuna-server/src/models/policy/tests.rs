//! Rules that hold for any models in any room, and a life of several models by a clock that is set.

use proptest::prelude::*;

use super::*;

fn needs(least: u64, working: u64, most: u64) -> Needs {
    Needs {
        least,
        working: working.max(least),
        most: most.max(working).max(least),
        program: 0,
    }
}

/// Models of a few bytes, each with a share from its least to its most.
fn residents() -> impl Strategy<Value = Vec<Resident>> {
    let one = (0u64..30, 0u64..40, 0u64..60, 0u64..=10, 0u8..5, 0u64..8);
    let start = Instant::now();
    proptest::collection::vec(one, 0..6).prop_map(move |all| {
        let resident = |(index, (least, more, most, tenths, standing, used))| {
            let needs = needs(least, least + more, least + more + most);
            Resident {
                id: ModelId(index),
                needs,
                share: needs.least + (needs.most - needs.least) * tenths / 10,
                standing: match standing {
                    0..3 => Standing::Idle,
                    3 => Standing::Busy,
                    _ => Standing::Leaving,
                },
                used: start + Duration::from_secs(used),
                keep: None,
            }
        };
        all.into_iter().enumerate().map(resident).collect()
    })
}

fn get(residents: &[Resident], id: ModelId) -> Resident {
    let found = residents.iter().find(|it| it.id == id);
    *found.expect("one of them")
}

/// What is left when `gives` have been carried out.
fn after(residents: &[Resident], gives: &[Give]) -> Vec<Resident> {
    let mut residents = residents.to_vec();
    for &give in gives {
        apply(&mut residents, give);
    }
    residents
}

fn unloaded(gives: &[Give]) -> Vec<ModelId> {
    let gone = gives.iter().filter(|give| give.keeps.is_none());
    gone.map(|give| give.id).collect()
}

/// Whether `wanted` has `target` when the idle models of `mask` are unloaded and the others shrunk to their least.
fn fits_without(room: u64, residents: &[Resident], target: u64, mask: usize) -> bool {
    let idle = idle(residents);
    let mut held = taken(&staying(residents)) - taken(&idle) + target;
    for (bit, one) in idle.iter().enumerate() {
        if mask & (1 << bit) == 0 {
            held += one.share.min(one.needs.least);
        }
    }
    held <= room
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn room_is_found_without_exceeding_it_and_at_no_cost_to_what_works(
        residents in residents(), room in 0u64..300,
        least in 0u64..40, working in 0u64..60, most in 0u64..80,
    ) {
        prop_assume!(taken(&staying(&residents)) <= room);
        let wanted = needs(least, working, most);
        match find(room, &residents, &wanted) {
            Found::Share { bytes, gives } => {
                prop_assert!(bytes >= wanted.least && bytes <= wanted.working);
                prop_assert!(taken(&staying(&after(&residents, &gives))) + bytes <= room);
                for give in &gives {
                    let before = get(&residents, give.id);
                    prop_assert_eq!(before.standing, Standing::Idle);
                    let kept = give.keeps.is_none_or(|keeps| {
                        keeps < before.share && keeps >= before.needs.least
                    });
                    prop_assert!(kept, "{:?} of {:?}", give, before);
                }
                // Those that go were used before those that stay.
                let gone = unloaded(&gives);
                let stay = idle(&residents).into_iter().filter(|it| !gone.contains(&it.id));
                let oldest = stay.map(|it| (it.used, it.id)).min();
                let newest = gone.iter().map(|&id| (get(&residents, id).used, id)).max();
                prop_assert!(oldest.is_none() || newest.is_none() || newest < oldest);
                // Fewer than go would not have done: by every set of as many less one.
                let target = wanted.working.min(room);
                if bytes >= target && let Some(fewer) = gone.len().checked_sub(1) {
                    let count = idle(&residents).len();
                    // In the order of their use: of all sets, the policy may choose these alone.
                    let first = (1usize << fewer) - 1;
                    prop_assert!(fewer <= count && !fits_without(room, &residents, target, first));
                }
                // Less than its working share only when all that are idle could not give it.
                if bytes < target {
                    let all = (1usize << idle(&residents).len()) - 1;
                    prop_assert!(!fits_without(room, &residents, target, all));
                }
            }
            Found::Later { on } => {
                let all = (1usize << idle(&residents).len()) - 1;
                prop_assert!(!fits_without(room, &residents, wanted.least, all));
                let mut ended = residents.clone();
                for one in &mut ended {
                    if on.contains(&one.id) {
                        prop_assert_eq!(one.standing, Standing::Busy);
                        one.standing = Standing::Idle;
                    }
                }
                let found = find(room, &ended, &wanted);
                let has_room = matches!(found, Found::Share { .. });
                prop_assert!(has_room, "{:?}", found);
            }
            Found::Never => prop_assert!(wanted.least > room),
        }
    }

    #[test]
    fn what_grows_takes_what_is_free_and_what_idle_ones_can_spare(
        residents in residents(), room in 0u64..400,
    ) {
        prop_assume!(taken(&residents) <= room);
        let busy = with(&residents, Standing::Busy);
        let short: Vec<ModelId> = busy.iter().map(|it| it.id).collect();
        let changes = grow(room, &residents, &short);
        let mut now = residents.clone();
        for &change in &changes {
            apply(&mut now, change);
            // Who gives comes first, so it holds between any two of them.
            prop_assert!(taken(&now) <= room);
        }
        for (before, now) in residents.iter().zip(&now) {
            match before.standing {
                Standing::Busy => {
                    prop_assert!(now.share >= before.share);
                    prop_assert!(now.share <= before.share.max(before.needs.most));
                }
                Standing::Idle => prop_assert!(now.share <= before.share && now.share >= before.least()),
                Standing::Leaving => prop_assert_eq!(now.share, before.share),
            }
        }
        // An idle one goes below its working share only for one that has not its own.
        let squeezed = residents.iter().zip(&now).any(|(before, now)| now.share < before.comfortable());
        let lacking = busy.iter().any(|it| it.share < it.needs.working);
        prop_assert!(!squeezed || lacking);
        // A model that lacks its working share gets all that can be had of it.
        if let [one] = busy.as_slice() && one.share < one.needs.working {
            let spare: u64 = idle(&residents).iter().map(|it| it.share - it.least()).sum();
            let there = one.share + spare + room - taken(&residents);
            prop_assert!(get(&now, one.id).share >= one.needs.working.min(there));
        }
    }

    #[test]
    fn a_room_that_shrinks_is_kept_to_as_long_as_leasts_allow(
        residents in residents(), room in 0u64..300,
    ) {
        let gives = relieve(room, &residents);
        let left = after(&residents, &gives);
        for (before, left) in residents.iter().zip(&left) {
            prop_assert!(left.share <= before.share);
            prop_assert!(before.standing != Standing::Leaving || left.share == before.share);
            prop_assert!(before.standing == Standing::Idle || left.share >= before.least());
        }
        let floor: u64 = residents.iter().map(|it| match it.standing {
            Standing::Idle => 0,
            Standing::Busy => it.least(),
            Standing::Leaving => 0,
        }).sum();
        prop_assert!(taken(&staying(&left)) <= room.max(floor));
        if taken(&staying(&residents)) <= room {
            prop_assert!(gives.is_empty());
        }
        // What works gives nothing while an idle one has something.
        let busy_gives = gives.iter().any(|give| get(&residents, give.id).standing == Standing::Busy);
        let idle_left: u64 = left.iter().filter(|it| it.standing == Standing::Idle).map(|it| it.share).sum();
        prop_assert!(!busy_gives || idle_left == 0);
    }
}

fn resident(id: usize, used: Instant, share: u64) -> Resident {
    Resident {
        id: ModelId(id),
        needs: needs(20, 60, 100),
        share,
        standing: Standing::Idle,
        used,
        keep: Some(Duration::from_secs(300)),
    }
}

#[test]
fn what_is_kept_beyond_the_working_share_goes_before_weights_and_weights_before_a_model() {
    let now = Instant::now();
    let later = now + Duration::from_secs(1);
    let two = [resident(0, now, 90), resident(1, later, 90)];
    let wanted = needs(10, 50, 50);
    let gives = |room| match find(room, &two, &wanted) {
        Found::Share { bytes: 50, gives } => gives,
        other => panic!("{other:?}"),
    };
    let keeps = |id: usize, bytes: u64| Give {
        id: ModelId(id),
        keeps: Some(bytes),
    };
    assert_eq!(gives(230), []);
    assert_eq!(gives(210), [keeps(0, 70)]);
    assert_eq!(gives(180), [keeps(0, 60), keeps(1, 70)]);
    assert_eq!(gives(150), [keeps(0, 40), keeps(1, 60)]);
    assert_eq!(gives(100), [keeps(0, 20), keeps(1, 30)]);
    assert_eq!(gives(85), [unload(&two[0]), keeps(1, 35)]);
    assert_eq!(gives(55), [unload(&two[0]), unload(&two[1])]);
}

#[test]
fn a_model_goes_when_nobody_has_used_it_for_as_long_as_it_is_to_stay() {
    let now = Instant::now();
    let mut all = [
        resident(0, now, 50),
        resident(1, now, 50),
        resident(2, now, 50),
    ];
    (all[1].standing, all[2].keep) = (Standing::Busy, None);
    let at = |seconds| now + Duration::from_secs(seconds);
    assert_eq!(next_expiry(&all), Some(at(300)));
    assert_eq!(expired(&all, at(299)), []);
    assert_eq!(expired(&all, at(300)), [ModelId(0)]);
    all[0].keep = Some(Duration::MAX);
    assert_eq!(next_expiry(&all), None, "too far away to be a time");
}
