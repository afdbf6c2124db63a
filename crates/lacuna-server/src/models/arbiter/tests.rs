//! Lives of several models by a clock that is set, with loads that take their time and fail.

use proptest::prelude::*;

use super::*;

fn needs(least: u64, working: u64, most: u64) -> Needs {
    Needs {
        least,
        working,
        most,
        program: 0,
    }
}

/// What may happen.
#[derive(Debug, Clone)]
enum Act {
    Ask {
        model: usize,
        keep: Option<u64>,
    },
    /// The request that was granted longest ago, or one of the later, is over.
    End(usize),
    GiveUp(usize),
    Pass(u64),
    Unload {
        model: usize,
        within: u64,
    },
    Short(usize),
    /// One of the requests under way needs a share of so much.
    Want {
        place: usize,
        share: u64,
    },
    /// The step under way is over.
    Done {
        fails: bool,
        free: bool,
    },
    Freed(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (0usize..4, proptest::option::of(0u64..20))
            .prop_map(|(model, keep)| Act::Ask { model, keep }),
        8 => (0usize..8).prop_map(Act::End),
        1 => (0usize..8).prop_map(Act::GiveUp),
        3 => (1u64..15).prop_map(Act::Pass),
        1 => (0usize..4, 0u64..10).prop_map(|(model, within)| Act::Unload { model, within }),
        2 => (0usize..4).prop_map(Act::Short),
        2 => (0usize..8, 1u64..160).prop_map(|(place, share)| Act::Want { place, share }),
        12 => (0u8..10, 0u8..4).prop_map(|(fails, late)| Act::Done { fails: fails == 0, free: late > 0 }),
        4 => (0usize..4).prop_map(Act::Freed),
    ]
}

/// An arbiter, and the world that its steps change.
struct World {
    arbiter: Arbiter<u64>,
    room: u64,
    now: Instant,
    /// Bytes that each model has.
    held: Vec<u64>,
    loaded: Vec<bool>,
    /// Requests that use a model, and since which of its loads.
    active: Vec<(ModelId, u64)>,
    /// By when a model is to be unloaded, whoever uses it.
    leaves_by: Vec<Option<Instant>>,
    step: Option<Step>,
    /// Requests that wait, in the order they came.
    waiting: Vec<(u64, ModelId)>,
    /// Those of them that ask for a larger share.
    wants: Vec<u64>,
    next: u64,
    answered: u64,
}

impl World {
    fn new(room: u64, needs: &[Needs]) -> Self {
        let count = needs.len();
        Self {
            arbiter: Arbiter::new(
                room,
                needs.iter().copied().map(Ok),
                100,
                Some(Duration::from_secs(10)),
            ),
            room,
            now: Instant::now(),
            held: vec![0; count],
            loaded: vec![false; count],
            active: Vec::new(),
            leaves_by: vec![None; count],
            step: None,
            waiting: Vec::new(),
            wants: Vec::new(),
            next: 0,
            answered: 0,
        }
    }

    fn ask(&mut self, id: ModelId, keep: Option<u64>) {
        let (ticket, now) = (self.next, self.now);
        self.next += 1;
        let keep = keep.map(|seconds| Some(Duration::from_secs(seconds)));
        match self.arbiter.ask(id, keep, now, ticket) {
            Asked::Answered(_, answer) => self.told(id, &answer),
            Asked::Waits => self.waiting.push((ticket, id)),
        }
    }

    fn told(&mut self, id: ModelId, answer: &Answer) {
        self.answered += 1;
        if let Answer::Granted(generation) = answer {
            assert!(self.loaded[id.0], "{id:?} was granted and is not loaded");
            self.active.push((id, *generation));
        }
    }

    fn answers(&mut self, answers: Vec<(ModelId, u64, Answer)>) {
        for (_, ticket, answer) in answers {
            let place = self
                .waiting
                .iter()
                .position(|(waiting, _)| *waiting == ticket);
            let place = place.expect("one that waits");
            let (_, id) = self.waiting.remove(place);
            let uses = |ticket: &u64| !self.wants.contains(ticket);
            let before = &self.waiting[..place];
            let earlier = before
                .iter()
                .any(|(ticket, other)| *other == id && uses(ticket));
            assert!(
                !earlier || !uses(&ticket),
                "who came first has {id:?} first"
            );
            self.told(id, &answer);
        }
    }

    /// Plans, and begins what is to be done.
    fn plan(&mut self) {
        let plan = self.arbiter.plan(self.now);
        self.answers(plan.answers);
        let Some(step) = plan.step else {
            return;
        };
        assert_eq!(self.step, None, "one thing at a time");
        match step {
            Step::Load { id, share } => {
                assert!(!self.loaded[id.0] && self.held[id.0] == 0);
                self.held[id.0] = share;
            }
            Step::Change { id, share } => {
                assert!(self.loaded[id.0]);
                self.held[id.0] = self.held[id.0].max(share);
                let busy = self.active.iter().any(|(other, _)| *other == id);
                assert!(
                    !busy || share >= self.held[id.0],
                    "what works keeps its share"
                );
            }
            Step::Unload { id } => {
                assert!(self.loaded[id.0]);
                let over = self.leaves_by[id.0].is_some_and(|by| by <= self.now);
                let used = self.active.iter().any(|(other, _)| *other == id);
                assert!(over || !used, "{id:?} is unloaded while it is used");
                (self.loaded[id.0], self.leaves_by[id.0]) = (false, None);
                self.active.retain(|(other, _)| *other != id);
            }
        }
        self.step = Some(step);
        let held: u64 = self.held.iter().sum();
        assert!(held <= self.room, "{held} of {}", self.room);
        let (_, taken) = self.arbiter.room();
        assert_eq!(taken, held, "the arbiter knows what is held");
    }

    /// The step under way is over.
    fn done(&mut self, fails: bool, free: bool) {
        let Some(step) = self.step.take() else {
            return;
        };
        let outcome = match step {
            Step::Load { id, .. } if fails => {
                self.held[id.0] = 0;
                let reason = "as tests do".to_owned();
                Outcome::Failed { reason }
            }
            Step::Load { id, .. } => {
                self.loaded[id.0] = true;
                Outcome::Loaded { least: 0 }
            }
            Step::Change { id, share } => {
                self.held[id.0] = share;
                Outcome::Changed { share }
            }
            Step::Unload { id } => {
                if free {
                    self.held[id.0] = 0;
                }
                Outcome::Unloaded { free }
            }
        };
        let answers = self.arbiter.record(outcome, self.now);
        self.answers(answers);
    }

    fn freed(&mut self, id: ModelId) {
        let doing = matches!(self.step, Some(Step::Unload { id: other }) if other == id);
        let leaves = matches!(self.arbiter.models[id.0].phase, Phase::Leaving(_));
        if leaves && !doing {
            self.arbiter.is_gone(id);
            self.held[id.0] = 0;
        }
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Ask { model, keep } => self.ask(ModelId(model), keep),
            Act::End(place) => {
                if let Some(place) = place.checked_rem(self.active.len()) {
                    let (id, generation) = self.active.remove(place);
                    self.arbiter.release(id, generation, self.now);
                }
            }
            Act::GiveUp(place) => {
                if let Some(place) = place.checked_rem(self.waiting.len()) {
                    let (gone, _) = self.waiting.remove(place);
                    self.arbiter.retain(|ticket| *ticket != gone);
                }
            }
            Act::Pass(seconds) => self.now += Duration::from_secs(seconds),
            Act::Unload { model, within } => {
                let by = self.now + Duration::from_secs(within);
                if self.arbiter.unload(ModelId(model), by) {
                    let place = &mut self.leaves_by[model];
                    *place = Some(place.map_or(by, |other| other.min(by)));
                }
            }
            Act::Short(model) => self.arbiter.set_short(vec![ModelId(model)]),
            Act::Want { place, share } => {
                if let Some(place) = place.checked_rem(self.active.len()) {
                    let ((id, _), ticket) = (self.active[place], self.next);
                    self.next += 1;
                    if self.arbiter.want(id, share, ticket) {
                        self.waiting.push((ticket, id));
                        self.wants.push(ticket);
                    }
                }
            }
            Act::Done { fails, free } => self.done(fails, free),
            Act::Freed(model) => self.freed(ModelId(model)),
        }
        self.plan();
    }

    /// Everybody who uses a model ends, and everything that is begun is finished.
    fn settle(&mut self) {
        for _ in 0..1000 {
            while let Some((id, generation)) = self.active.pop() {
                self.arbiter.release(id, generation, self.now);
            }
            self.done(false, true);
            (0..self.held.len()).for_each(|model| self.freed(ModelId(model)));
            self.plan();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Whatever is asked in whatever order: never more than the room, nothing that works is disturbed, whoever came
    /// first has a model first, and nobody waits for ever.
    #[test]
    fn several_models_share_a_room(
        room in 60u64..160,
        acts in proptest::collection::vec(act(), 1..120),
    ) {
        // Two that fit one and a half times into most rooms, a small one, and one that is too large for many.
        let all = [needs(20, 50, 120), needs(25, 60, 90), needs(8, 10, 10), needs(90, 120, 150)];
        let mut world = World::new(room, &all);
        for act in &acts {
            world.act(act);
        }
        world.settle();
        prop_assert!(world.waiting.is_empty(), "{:?} wait", world.waiting);
        // When nobody has used them for long enough, all are gone.
        world.now += Duration::from_secs(60);
        world.settle();
        prop_assert_eq!(world.held.iter().sum::<u64>(), 0);
    }
}

/// Two models that do not fit together and are asked for in turns, each by many: neither starves the other.
#[test]
fn a_model_that_others_keep_asking_for_gives_way_to_one_that_waits() {
    let mut world = World::new(100, &[needs(60, 80, 90), needs(60, 80, 90)]);
    world.act(&Act::Ask {
        model: 0,
        keep: None,
    });
    world.act(&Act::Done {
        fails: false,
        free: true,
    });
    assert_eq!(world.active.len(), 1);
    world.act(&Act::Ask {
        model: 1,
        keep: None,
    });
    for _ in 0..5 {
        // A request that comes later than the one for the other model does not go before it.
        world.act(&Act::Ask {
            model: 0,
            keep: None,
        });
        assert_eq!(world.active.len(), 1, "those who come later wait");
    }
    world.act(&Act::End(0));
    assert_eq!(world.step, Some(Step::Unload { id: ModelId(0) }));
    world.act(&Act::Done {
        fails: false,
        free: false,
    });
    assert_eq!(world.step, None, "its memory is not free yet");
    world.act(&Act::Freed(0));
    assert_eq!(
        world.step,
        Some(Step::Load {
            id: ModelId(1),
            share: 80
        })
    );
    world.act(&Act::Done {
        fails: false,
        free: true,
    });
    assert!(world.active.iter().all(|(id, _)| *id == ModelId(1)) && world.active.len() == 1);
    world.act(&Act::End(0));
    world.act(&Act::Done {
        fails: false,
        free: true,
    });
    world.act(&Act::Done {
        fails: false,
        free: true,
    });
    assert_eq!(world.active.len(), 5, "all that waited for the first");
}

/// Two requests that want what the other's model has: one of them is told so, and the other has it when that has ended.
#[test]
fn requests_that_want_each_others_room_do_not_wait_for_each_other() {
    let all = [needs(20, 50, 120), needs(20, 50, 120)];
    let mut world = World::new(100, &all);
    let done = Act::Done {
        fails: false,
        free: true,
    };
    for model in [0, 1] {
        world.act(&Act::Ask { model, keep: None });
        world.act(&done);
    }
    assert_eq!(world.active.len(), 2);
    world.act(&Act::Want {
        place: 0,
        share: 70,
    });
    assert_eq!((world.step, world.waiting.len()), (None, 1), "it waits");
    world.act(&Act::Want {
        place: 1,
        share: 60,
    });
    assert_eq!(
        world.waiting.len(),
        1,
        "what waits for it would wait for ever"
    );
    world.act(&Act::End(1));
    let gives = Step::Change {
        id: ModelId(1),
        share: 30,
    };
    assert_eq!(world.step, Some(gives));
    world.act(&done);
    let gets = Step::Change {
        id: ModelId(0),
        share: 70,
    };
    assert_eq!(world.step, Some(gets));
    world.act(&done);
    assert!(world.waiting.is_empty() && world.held == [70, 30]);
}

#[test]
fn a_model_that_fails_is_refused_to_those_who_wait_for_it_and_tried_again_for_the_next() {
    let mut world = World::new(100, &[needs(20, 40, 40), needs(200, 300, 300)]);
    for _ in 0..3 {
        world.act(&Act::Ask {
            model: 0,
            keep: None,
        });
    }
    world.act(&Act::Done {
        fails: true,
        free: true,
    });
    assert_eq!((world.answered, world.active.len()), (3, 0));
    let status = world.arbiter.status(ModelId(0));
    assert_eq!(status.failure.as_deref(), Some("as tests do"));
    world.act(&Act::Ask {
        model: 1,
        keep: None,
    });
    assert_eq!(
        (world.answered, world.step),
        (4, None),
        "more than there can be"
    );
    world.act(&Act::Ask {
        model: 0,
        keep: None,
    });
    world.act(&Act::Done {
        fails: false,
        free: true,
    });
    assert_eq!(world.active.len(), 1);
    assert_eq!(world.arbiter.status(ModelId(0)).failure, None);
}

#[test]
fn those_who_wait_are_bounded() {
    let needs = [needs(20, 40, 40)];
    let mut arbiter = Arbiter::new(100, needs.map(Ok), 2, None);
    let now = Instant::now();
    let mut ask = |ticket| arbiter.ask(ModelId(0), None, now, ticket);
    assert_eq!((ask(0), ask(1)), (Asked::Waits, Asked::Waits));
    let full = Answer::Refused(NotLoaded::QueueFull);
    assert_eq!(ask(2), Asked::Answered(2, full));
}

#[test]
fn a_model_whose_replies_may_still_end_is_said_to_be_unloading() {
    let mut world = World::new(100, &[needs(20, 40, 40)]);
    let done = Act::Done {
        fails: false,
        free: true,
    };
    world.act(&Act::Ask {
        model: 0,
        keep: None,
    });
    world.act(&done);
    let state = |world: &World| world.arbiter.status(ModelId(0)).state;
    assert_eq!(state(&world), "loaded");
    world.act(&Act::Unload {
        model: 0,
        within: 5,
    });
    assert_eq!((state(&world), world.active.len()), ("unloading", 1));
    world.act(&Act::End(0));
    world.act(&done);
    assert_eq!(state(&world), "unloaded");
}
