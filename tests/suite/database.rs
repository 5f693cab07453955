//! The SQL database on all three: what the schema refuses, what errors mean, who waits for whom.

use std::{future::Future, pin::pin, task::Poll, time::Duration};

use sea_orm::{
    ActiveValue::{NotSet, Set},
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, IntoActiveModel, PaginatorTrait, QueryFilter,
    QueryOrder, QuerySelect, QueryTrait, Statement,
};
use seckill::{
    database::{
        Acquired, Backend, Database, DatabaseSettings, OpenError, SqlFault, Transaction, classify,
        insert_ignore, lock_free_rows, lock_rows,
    },
    domain::TimeMs,
    entity::{activities, adjustments, audit, offers, orders, outbox},
};
use tokio::{
    sync::{Barrier, Notify},
    time::Instant,
};

use crate::support::{
    databases::{Fresh, on_every_database},
    eventually,
    wire::Wire,
};

const STEPS: usize = 8;

fn activity() -> activities::Model {
    activities::Model {
        id: "double11".to_owned(),
        title: "双十一".to_owned(),
        state: activities::ActivityState::Scheduled,
        start_time: 1_000,
        end_time: 2_000,
        retention_s: 86_400,
        version: 1,
        create_time: 500,
        update_time: 500,
    }
}

fn offer() -> offers::Model {
    offers::Model {
        activity_id: "double11".to_owned(),
        sku_id: "phone".to_owned(),
        title: "手机 📱".to_owned(),
        price_minor: 199_900,
        currency: "CNY".to_owned(),
        total: 10,
        reserved: 0,
        sold: 0,
        max_orders_per_user: 1,
        max_quantity_per_order: 2,
        hold_s: 900,
        segments: 1,
        epoch: 1,
        warm_time: None,
    }
}

/// A pending reservation of one unit; the id is also the buyer's.
fn reservation(id: &str) -> outbox::ActiveModel {
    outbox::ActiveModel {
        id: NotSet,
        reservation_id: Set(id.to_owned()),
        activity_id: Set("double11".to_owned()),
        sku_id: Set("phone".to_owned()),
        user_id: Set(id.to_owned()),
        quantity: Set(1),
        slot: Set(Some(1)),
        order_no: Set(format!("order-{id}")),
        request_id: Set(None),
        epoch: Set(1),
        batch: Set("a batch".to_owned()),
        state: Set(outbox::OutboxState::Pending),
        reason: Set(None),
        attempts: Set(0),
        next_attempt_time: Set(1_000),
        last_error: Set(None),
        expire_time: Set(Some(901_000)),
        create_time: Set(1_000),
        settle_time: Set(None),
    }
}

/// One transaction: committed when `work` was done, else rolled back.
async fn write<T>(
    db: &Database,
    work: impl AsyncFnOnce(&Transaction) -> Result<T, DbErr>,
) -> Result<T, DbErr> {
    let tx = db.begin().await?;
    match work(&tx).await {
        Ok(done) => tx.commit().await.map(|()| done),
        Err(error) => {
            tx.rollback().await?;
            Err(error)
        }
    }
}

async fn write_sql(db: &Database, sql: &str) -> Result<u64, DbErr> {
    write(db, async |tx| Ok(tx.execute_unprepared(sql).await?.rows_affected())).await
}

async fn put_on_sale(db: &Database) {
    write(db, async |tx| {
        activities::Entity::insert(activity().into_active_model()).exec(tx).await?;
        offers::Entity::insert(offer().into_active_model()).exec(tx).await
    })
    .await
    .unwrap();
}

async fn the_offer(db: &Database) -> offers::Model {
    offers::Entity::find().one(db.reader()).await.unwrap().unwrap()
}

async fn reserve(db: &Database, id: &str) {
    write(db, async |tx| insert_ignore(tx, vec![reservation(id)]).await).await.unwrap();
}

/// One value of one row, as text.
async fn ask<C: ConnectionTrait>(db: &C, sql: &str) -> String {
    let row = db.query_one_raw(Statement::from_string(db.get_database_backend(), sql)).await;
    let row = row.unwrap().unwrap();
    row.try_get_by_index::<String>(0)
        .or_else(|_| row.try_get_by_index::<i64>(0).map(|number| number.to_string()))
        .or_else(|_| row.try_get_by_index::<i32>(0).map(|number| number.to_string()))
        .or_else(|_| row.try_get_by_index::<u64>(0).map(|number| number.to_string()))
        .or_else(|_| row.try_get_by_index::<f64>(0).map(|number| number.to_string()))
        .unwrap()
}

fn fault<T: std::fmt::Debug>(result: Result<T, DbErr>) -> SqlFault {
    let error = result.expect_err("this was to fail");
    let fault = classify(&error);
    assert!(fault != SqlFault::Unknown, "unknown: {error:?}");
    fault
}

on_every_database! {
    async fn migrations_go_up_down_and_up_again(db: &Fresh) {
        let applied = |status: &[(String, bool)]| status.iter().filter(|step| step.1).count();
        assert!(db.is_current().await.unwrap());
        db.migrate_down(1).await.unwrap();
        assert_eq!(applied(&db.migration_status().await.unwrap()), STEPS - 1);
        assert!(!db.is_current().await.unwrap());
        db.migrate_down(100).await.unwrap();
        let status = db.migration_status().await.unwrap();
        assert_eq!((status.len(), applied(&status)), (STEPS, 0));
        db.migrate_up(None).await.unwrap();
        db.migrate_up(None).await.unwrap();
        assert!(db.is_current().await.unwrap());
        put_on_sale(db).await;
    }

    async fn migrations_at_the_same_time_all_succeed(db: &Fresh) {
        let others = [db.again().await, db.again().await, db.again().await];
        for _ in 0..3 {
            db.migrate_down(100).await.unwrap();
            write_sql(db, "DROP TABLE seaql_migrations").await.unwrap();
            let [a, b, c] = &others;
            let (a, b, c, d) =
                tokio::join!(a.migrate_up(None), b.migrate_up(None), c.migrate_up(None), db.migrate_up(None));
            a.and(b).and(c).and(d).unwrap();
            assert!(db.is_current().await.unwrap());
        }
        for other in others {
            other.close().await.unwrap();
        }
    }

    async fn a_schema_of_a_newer_program_is_told(db: &Fresh) {
        write_sql(db, "INSERT INTO seaql_migrations (version, applied_at) VALUES ('m9', 0)")
            .await
            .unwrap();
        let error = db.is_current().await.unwrap_err();
        assert!(error.to_string().contains("m9"), "{error}");
    }

    async fn what_goes_in_comes_back(db: &Fresh) {
        put_on_sale(db).await;
        assert_eq!(activities::Entity::find().one(db.reader()).await.unwrap(), Some(activity()));
        assert_eq!(the_offer(db).await, offer());
        let order = orders::Model {
            order_no: "order-1".to_owned(),
            reservation_id: "9007199254740993".to_owned(),
            activity_id: "double11".to_owned(),
            sku_id: "phone".to_owned(),
            user_id: "~!@#$%^&*()_+`'\"\\".to_owned(),
            slot: Some(1),
            quantity: 2,
            price_minor: i64::MAX,
            currency: "CNY".to_owned(),
            state: orders::OrderState::Confirmed,
            create_time: 1_764_000_000_123,
            confirm_time: Some(1_764_000_000_124),
            cancel_time: None,
            cancel_reason: Some("原因".to_owned()),
        };
        let adjustment = adjustments::Model {
            request_id: "r".to_owned(),
            activity_id: "double11".to_owned(),
            sku_id: "phone".to_owned(),
            delta: -3,
            epoch: 2,
            state: adjustments::AdjustmentState::Cancelled,
            create_time: 1,
            possible: -2,
        };
        let entry = audit::ActiveModel {
            id: NotSet,
            at: Set(7),
            actor: Set("ops".to_owned()),
            action: Set("warm_up".to_owned()),
            activity_id: Set(Some("double11".to_owned())),
            sku_id: Set(None),
            detail: Set("{\"备注\": \"📱\"}".to_owned()),
        };
        write(db, async |tx| {
            orders::Entity::insert(order.clone().into_active_model()).exec(tx).await?;
            adjustments::Entity::insert(adjustment.clone().into_active_model()).exec(tx).await?;
            audit::Entity::insert(entry.clone()).exec(tx).await?;
            insert_ignore(tx, vec![reservation("1")]).await
        })
        .await
        .unwrap();
        assert_eq!(orders::Entity::find().one(db.reader()).await.unwrap(), Some(order));
        assert_eq!(adjustments::Entity::find().one(db.reader()).await.unwrap(), Some(adjustment));
        let row = audit::Entity::find().one(db.reader()).await.unwrap().unwrap();
        assert_eq!(Set(row.detail), entry.detail);
        let row = outbox::Entity::find().one(db.reader()).await.unwrap().unwrap();
        assert_eq!((row.id, row.state), (1, outbox::OutboxState::Pending));
    }

    async fn an_id_is_never_handed_out_twice(db: &Fresh) {
        reserve(db, "1").await;
        reserve(db, "2").await;
        write_sql(db, "DELETE FROM outbox").await.unwrap();
        reserve(db, "3").await;
        let row = outbox::Entity::find().one(db.reader()).await.unwrap().unwrap();
        assert_eq!(row.id, 3);
    }

    async fn the_figures_of_an_offer_stay_in_order(db: &Fresh) {
        put_on_sale(db).await;
        for change in [
            "reserved = 11",
            "reserved = -1",
            "sold = 1",
            "sold = -1",
            "total = -1",
            "total = 9007199254740992",
            "price_minor = -1",
            "max_orders_per_user = 0",
            "max_orders_per_user = 101",
            "max_quantity_per_order = 1001",
            "hold_s = -1",
            "segments = 0",
            "segments = 257",
            "epoch = 0",
            "sku_id = NULL",
        ] {
            let changed = write_sql(db, &format!("UPDATE offers SET {change}")).await;
            assert_eq!(fault(changed), SqlFault::Data, "{change}");
        }
        assert_eq!(the_offer(db).await, offer());
        write_sql(db, "UPDATE offers SET reserved = 10, sold = 10").await.unwrap();
        write_sql(db, "UPDATE offers SET reserved = reserved - 1, sold = sold - 1").await.unwrap();
    }

    async fn a_state_that_is_no_word_of_ours_is_refused(db: &Fresh) {
        put_on_sale(db).await;
        reserve(db, "1").await;
        for change in [
            "activities SET state = 'Scheduled'",
            "activities SET end_time = start_time",
            "activities SET retention_s = -1",
            "outbox SET state = 'gone'",
            "outbox SET quantity = 0",
            // A slot is set exactly while the row is live.
            "outbox SET state = 'releasing'",
            "outbox SET state = 'refused'",
            "outbox SET slot = NULL",
            "outbox SET slot = 0",
        ] {
            let changed = write_sql(db, &format!("UPDATE {change}")).await;
            assert_eq!(fault(changed), SqlFault::Data, "{change}");
        }
        let moves = [("done", "1"), ("releasing", "NULL"), ("released", "NULL"), ("dead", "1")];
        for (state, slot) in moves {
            let sql = format!("UPDATE outbox SET state = '{state}', slot = {slot}");
            assert_eq!(write_sql(db, &sql).await.unwrap(), 1, "{state}");
        }
    }

    async fn ids_that_differ_in_case_are_different(db: &Fresh) {
        let ids = ["a", "A", "aa", "Aa", "9007199254740992", "9007199254740993", "1", "01"];
        for id in ids {
            reserve(db, id).await;
        }
        for id in ids {
            let rows = outbox::Entity::find().filter(outbox::Column::UserId.eq(id));
            let rows = rows.all(db.reader()).await.unwrap();
            assert_eq!(rows.len(), 1, "{id}");
            assert_eq!(rows[0].reservation_id, id);
        }
    }

    async fn a_row_that_is_there_already_is_left_out(db: &Fresh) {
        let rows = |ids: std::ops::Range<usize>| ids.map(|id| reservation(&id.to_string()));
        let insert = async |rows: Vec<outbox::ActiveModel>| {
            write(db, async |tx| insert_ignore(tx, rows.clone()).await).await.unwrap()
        };
        // FOUND_ROWS: on MySQL a row that was there counts too.
        let count = |new, all| if db.backend() == Backend::MySql { all } else { new };
        assert_eq!(insert(vec![]).await, 0);
        assert_eq!(insert(rows(0..150).collect()).await, 150);
        assert_eq!(insert(rows(100..200).collect()).await, count(50, 100));
        assert_eq!(insert(rows(0..100).collect()).await, count(0, 100));
        let mut same_slot = reservation("another reservation");
        same_slot.user_id = Set("7".to_owned());
        assert_eq!(insert(vec![same_slot.clone()]).await, count(0, 1));
        same_slot.slot = Set(Some(2));
        assert_eq!(insert(vec![same_slot]).await, 1);
        assert_eq!(outbox::Entity::find().count(db.reader()).await.unwrap(), 201);
        // Nothing of the rows that were there has changed.
        let changed = outbox::Entity::find().filter(outbox::Column::OrderNo.ne("order-7"));
        assert_eq!(changed.count(db.reader()).await.unwrap(), 200);
    }

    async fn a_slot_is_free_again_once_it_is_null(db: &Fresh) {
        reserve(db, "1").await;
        write_sql(db, "UPDATE outbox SET state = 'released', slot = NULL").await.unwrap();
        let mut again = reservation("2");
        again.user_id = Set("1".to_owned());
        write(db, async |tx| insert_ignore(tx, vec![again]).await).await.unwrap();
        write_sql(db, "UPDATE outbox SET state = 'released', slot = NULL").await.unwrap();
        assert_eq!(outbox::Entity::find().count(db.reader()).await.unwrap(), 2);
    }

    async fn another_fault_of_a_row_is_not_hidden_as_a_conflict(db: &Fresh) {
        reserve(db, "1").await;
        let mut bad = reservation("2");
        bad.quantity = Set(0);
        let rows = vec![reservation("1"), bad, reservation("3")];
        let inserted = write(db, async |tx| insert_ignore(tx, rows).await).await;
        assert_eq!(fault(inserted), SqlFault::Data);
        assert_eq!(outbox::Entity::find().count(db.reader()).await.unwrap(), 1);
    }

    async fn after_a_conflict_the_rivals_row_is_seen(db: &Fresh) {
        let other = db.again().await;
        // A snapshot taken before the rival commits must not hide its row.
        let (rival_inserted, snapshot_taken) = (Notify::new(), Notify::new());
        let rival = async {
            write(&other, async |tx| {
                let inserted = insert_ignore(tx, vec![reservation("1")]).await;
                rival_inserted.notify_one();
                // On SQLite the other can't even begin before this one has committed.
                let limit = Duration::from_millis(200);
                tokio::time::timeout(limit, snapshot_taken.notified()).await.ok();
                inserted
            })
            .await
        };
        let late = async {
            rival_inserted.notified().await;
            write(db, async |tx| {
                outbox::Entity::find().all(tx).await?;
                snapshot_taken.notify_one();
                let mut mine = reservation("1");
                mine.batch = Set("mine".to_owned());
                insert_ignore(tx, vec![mine]).await?;
                outbox::Entity::find().all(tx).await
            })
            .await
        };
        let (rival, seen) = tokio::join!(rival, late);
        rival.unwrap();
        let seen = seen.unwrap();
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].batch, "a batch");
        other.close().await.unwrap();
    }

    async fn a_value_that_does_not_fit_is_the_rows_own_fault(db: &Fresh) {
        put_on_sale(db).await;
        let twice = offers::Entity::insert(offer().into_active_model());
        let result = write(db, async |tx| twice.exec_without_returning(tx).await).await;
        assert_eq!(fault(result), SqlFault::Data);
        let mut orphan = offer();
        orphan.activity_id = "nowhere".to_owned();
        let orphan = offers::Entity::insert(orphan.into_active_model());
        let result = write(db, async |tx| orphan.exec_without_returning(tx).await).await;
        assert_eq!(fault(result), SqlFault::Data);
        if db.backend() != Backend::Sqlite {
            let long = format!("UPDATE offers SET title = '{}'", "长".repeat(201));
            assert_eq!(fault(write_sql(db, &long).await), SqlFault::Data);
            let large = "UPDATE offers SET segments = 3000000000";
            assert_eq!(fault(write_sql(db, large).await), SqlFault::Data);
        }
        let fits = format!("UPDATE offers SET title = '{}'", "长".repeat(200));
        write_sql(db, &fits).await.unwrap();
    }

    async fn a_lock_that_is_not_given_up_ends_as_rolled_back(db: &Fresh) {
        put_on_sale(db).await;
        let other = db.again().await;
        let holder = db.begin().await.unwrap();
        holder.execute_unprepared("UPDATE offers SET reserved = 1").await.unwrap();
        let waited = write_sql(&other, "UPDATE offers SET reserved = reserved + 1").await;
        assert_eq!(fault(waited), SqlFault::RolledBack);
        holder.commit().await.unwrap();
        write_sql(&other, "UPDATE offers SET reserved = reserved + 1").await.unwrap();
        assert_eq!(the_offer(db).await.reserved, 2);
        other.close().await.unwrap();
    }

    async fn a_deadlock_ends_as_rolled_back_for_one(db: &Fresh) {
        put_on_sale(db).await;
        if db.backend() == Backend::Sqlite {
            return; // One writer: it can't come to that.
        }
        let both_hold_one = Barrier::new(2);
        let cross = async |first: &str, second: &str| {
            write(db, async |tx| {
                tx.execute_unprepared(first).await?;
                both_hold_one.wait().await;
                tx.execute_unprepared(second).await
            })
            .await
        };
        let activity = "UPDATE activities SET version = version + 1";
        let offer = "UPDATE offers SET reserved = reserved + 1";
        let (a, b) = tokio::join!(cross(activity, offer), cross(offer, activity));
        assert!(a.is_ok() != b.is_ok(), "{a:?} {b:?}");
        assert_eq!(a.err().or(b.err()).map(|error| classify(&error)), Some(SqlFault::RolledBack));
        assert_eq!(the_offer(db).await.reserved, 1);
    }

    async fn a_pool_without_a_free_connection_is_away(db: &Fresh) {
        let settings = DatabaseSettings {
            max_connections: 1,
            acquire_timeout_ms: 100,
            ..db.settings()
        };
        let small = Database::open(&settings).await.unwrap();
        let held = small.begin().await.unwrap();
        assert_eq!(fault(small.begin().await), SqlFault::Away);
        held.rollback().await.unwrap();
        small.begin().await.unwrap().rollback().await.unwrap();
        small.close().await.unwrap();
        assert_eq!(fault(small.begin().await), SqlFault::Away);
    }

    async fn a_read_changed_and_written_under_its_lock_loses_nothing(db: &Fresh) {
        put_on_sale(db).await;
        write_sql(db, "UPDATE offers SET total = 1000").await.unwrap();
        let other = db.again().await;
        let add = async |db: &Database| {
            for _ in 0..50 {
                write(db, async |tx| {
                    let row = lock_rows(offers::Entity::find()).one(tx).await?.unwrap();
                    let sql = format!("UPDATE offers SET reserved = {}", row.reserved + 1);
                    tx.execute_unprepared(&sql).await
                })
                .await
                .unwrap();
            }
        };
        tokio::join!(add(db), add(db), add(&other), add(&other));
        assert_eq!(the_offer(db).await.reserved, 200);
        other.close().await.unwrap();
    }

    async fn rows_that_others_have_locked_are_skipped(db: &Fresh) {
        for id in ["1", "2", "3"] {
            reserve(db, id).await;
        }
        let claim = async |tx: &Transaction| {
            let due = outbox::Entity::find()
                .filter(outbox::due(outbox::OutboxState::Pending))
                .filter(outbox::Column::NextAttemptTime.lte(1_000))
                .order_by_asc(outbox::Column::NextAttemptTime)
                .order_by_asc(outbox::Column::Id)
                .limit(2);
            let rows = lock_free_rows(due).all(tx).await.unwrap();
            rows.into_iter().map(|row| row.reservation_id).collect::<Vec<_>>()
        };
        let first = db.begin().await.unwrap();
        assert_eq!(claim(&first).await, ["1", "2"]);
        if db.backend() != Backend::Sqlite {
            let second = db.begin().await.unwrap();
            assert_eq!(claim(&second).await, ["3"]);
            second.rollback().await.unwrap();
        }
        first.rollback().await.unwrap();
    }

    async fn due_and_expiring_rows_are_found_by_their_index(db: &Fresh) {
        use outbox::{Column, OutboxState};
        let rows = (0..2_000).map(|id| reservation(&id.to_string())).collect();
        write(db, async |tx| insert_ignore(tx, rows).await).await.unwrap();
        let settled = "UPDATE outbox SET state = 'released', slot = NULL WHERE id > 20";
        write_sql(db, settled).await.unwrap();
        if db.backend() != Backend::Sqlite {
            let analyze = if db.backend() == Backend::Postgres { "ANALYZE" } else { "ANALYZE TABLE" };
            db.reader().execute_unprepared(&format!("{analyze} outbox")).await.unwrap();
        }
        let by_time = |state, index: &str| {
            let select = outbox::Entity::find().limit(10);
            if state == OutboxState::Dead {
                select.filter(outbox::due(state))
            } else if index != "outbox_expiring" {
                select
                    .filter(outbox::due(state))
                    .filter(Column::NextAttemptTime.lte(5_000))
                    .order_by_asc(Column::NextAttemptTime)
                    .order_by_asc(Column::Id)
            } else {
                select
                    .filter(outbox::expiring(state))
                    .filter(Column::ExpireTime.lte(2_000_000))
                    .order_by_asc(Column::ExpireTime)
                    .order_by_asc(Column::Id)
            }
        };
        let due = match db.backend() {
            Backend::Sqlite | Backend::Postgres => {
                ["outbox_pending", "outbox_releasing", "outbox_dead"]
            }
            Backend::MySql => ["outbox_due"; 3],
        };
        for (state, index) in [
            (OutboxState::Pending, due[0]),
            (OutboxState::Releasing, due[1]),
            (OutboxState::Dead, due[2]),
            (OutboxState::Pending, "outbox_expiring"),
            (OutboxState::Done, "outbox_expiring"),
        ] {
            let mut statement = by_time(state, index).build(db.reader().get_database_backend());
            let explain = match db.backend() {
                Backend::Sqlite => "EXPLAIN QUERY PLAN",
                Backend::Postgres | Backend::MySql => "EXPLAIN",
            };
            statement.sql = format!("{explain} {}", statement.sql);
            let column = match db.backend() {
                Backend::Sqlite => "detail",
                Backend::Postgres => "QUERY PLAN",
                Backend::MySql => "key",
            };
            let plan = db.reader().query_all_raw(statement).await.unwrap();
            let plan: Vec<Option<String>> =
                plan.iter().map(|row| row.try_get("", column).unwrap()).collect();
            assert!(format!("{plan:?}").contains(index), "{state:?} {index}: {plan:?}");
            assert!(!format!("{plan:?}").contains("TEMP B-TREE"), "{state:?} {index}: {plan:?}");
        }
    }

    async fn each_session_is_set_up(db: &Fresh) {
        let tx = db.begin().await.unwrap();
        let mut found = Vec::new();
        let questions: &[(&str, &str)] = match db.backend() {
            Backend::Sqlite => &[
                ("PRAGMA journal_mode", "wal"),
                ("PRAGMA synchronous", "2"),
                ("PRAGMA foreign_keys", "1"),
                ("PRAGMA busy_timeout", "1000"),
            ],
            Backend::Postgres => &[
                ("SHOW transaction_isolation", "read committed"),
                ("SHOW statement_timeout", "5s"),
                ("SHOW lock_timeout", "1s"),
                ("SHOW enable_seqscan", "off"),
                ("SHOW enable_bitmapscan", "off"),
                ("SHOW jit", "off"),
            ],
            Backend::MySql => &[
                ("SELECT @@tx_isolation", "READ-COMMITTED"),
                ("SELECT @@max_statement_time", "5"),
                ("SELECT @@innodb_lock_wait_timeout", "1"),
                ("SELECT @@sql_mode LIKE '%STRICT_ALL_TABLES%'", "1"),
                ("SELECT @@time_zone", "+00:00"),
            ],
        };
        for (question, expected) in questions {
            let answer = ask(&tx, question).await;
            if answer != *expected {
                found.push(format!("{question}: {answer}"));
            }
        }
        assert_eq!(found, Vec::<String>::new());
        tx.rollback().await.unwrap();
    }

    async fn a_statement_that_takes_too_long_is_ended_by_the_server(db: &Fresh) {
        let sleep = match db.backend() {
            Backend::Sqlite => return,
            Backend::Postgres => "SELECT pg_sleep(30)",
            Backend::MySql => "SELECT SLEEP(30)",
        };
        let hasty = DatabaseSettings { statement_timeout_ms: 200, ..db.settings() };
        let hasty = Database::open(&hasty).await.unwrap();
        let begun = std::time::Instant::now();
        let error = hasty.reader().execute_unprepared(sleep).await.unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert_eq!(classify(&error), SqlFault::Unknown, "{error:?}");
        hasty.close().await.unwrap();
    }

    async fn a_connection_that_breaks_leaves_an_unknown_result(db: &Fresh) {
        put_on_sale(db).await;
        if db.backend() == Backend::Sqlite {
            return; // There is nothing between us and the file.
        }
        let tx = db.begin().await.unwrap();
        tx.execute_unprepared("UPDATE offers SET reserved = 1").await.unwrap();
        kill(db, &tx).await;
        let error = tx.commit().await.unwrap_err();
        assert_eq!(classify(&error), SqlFault::Unknown, "{error:?}");
        assert_eq!(the_offer(db).await.reserved, 0);
    }

    async fn begin_replaces_connections_that_died_in_the_pool(db: &Fresh) {
        if db.backend() == Backend::Sqlite {
            return;
        }
        let killer = db.again().await;
        let mut begun = Vec::new();
        for _ in 0..db.settings().max_connections {
            begun.push(db.begin().await.unwrap());
        }
        let mut ids = Vec::new();
        for tx in &begun {
            ids.push(session(tx).await);
        }
        for tx in begun {
            tx.rollback().await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        for id in ids {
            kill_session(&killer, &id).await;
        }
        for _ in 0..db.settings().max_connections {
            db.begin().await.unwrap().rollback().await.unwrap();
        }
        killer.close().await.unwrap();
    }

    async fn a_database_that_fell_silent_is_not_waited_for(db: &Fresh) {
        if db.backend() == Backend::Sqlite {
            return;
        }
        put_on_sale(db).await;
        let mut url = url::Url::parse(&db.settings().url).unwrap();
        let store = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap());
        let wire = Wire::to(store.parse().unwrap()).await;
        url.set_port(Some(wire.addr.port())).unwrap();
        let settings = DatabaseSettings {
            url: url.to_string(),
            acquire_timeout_ms: 300,
            statement_timeout_ms: 500,
            ..db.settings()
        };
        let far = Database::open(&settings).await.unwrap();
        let held = far.begin().await.unwrap();
        held.execute_unprepared("UPDATE offers SET reserved = 2").await.unwrap();
        let idle = far.begin().await.unwrap();
        wire.open_hole();
        let silent = Instant::now();
        let (committed, begun, told) = tokio::join!(held.commit(), far.begin(), far.now());
        assert_eq!(classify(&committed.unwrap_err()), SqlFault::Unknown);
        assert_eq!(fault(begun), SqlFault::Away);
        assert!(told.is_err());
        assert_eq!(classify(&idle.commit().await.unwrap_err()), SqlFault::Unknown);
        assert!(silent.elapsed() < Duration::from_secs(6), "{:?}", silent.elapsed());

        wire.mend();
        far.now().await.unwrap();
        // What was lost on the way was never done, and the server itself gives its locks back.
        eventually("the row is free", async || {
            write_sql(&far, "UPDATE offers SET reserved = reserved + 5").await.ok()
        })
        .await;
        assert_eq!(the_offer(&far).await.reserved, 5);
        far.close().await.unwrap();
    }

    async fn a_database_that_went_away_and_came_back_costs_no_error(db: &Fresh) {
        if db.backend() == Backend::Sqlite {
            return;
        }
        put_on_sale(db).await;
        let mut url = url::Url::parse(&db.settings().url).unwrap();
        let mut road = Road::to(url.port().unwrap(), 0).await;
        url.set_port(Some(road.port)).unwrap();
        let settings = DatabaseSettings {
            url: url.to_string(),
            acquire_timeout_ms: 300,
            ..db.settings()
        };
        let far = Database::open(&settings).await.unwrap();
        write_sql(&far, "UPDATE offers SET reserved = 1").await.unwrap();
        let torn = far.begin().await.unwrap();
        torn.execute_unprepared("UPDATE offers SET reserved = 2").await.unwrap();
        road.close().await;
        let error = torn.commit().await.unwrap_err();
        assert_eq!(classify(&error), SqlFault::Unknown, "{error:?}");
        assert_eq!(fault(far.begin().await), SqlFault::Away);
        assert_eq!(fault(far.now().await), SqlFault::Away);
        road = Road::to(road.target, road.port).await;
        write_sql(&far, "UPDATE offers SET reserved = reserved + 5").await.unwrap();
        assert_eq!(the_offer(&far).await.reserved, 6);
        far.close().await.unwrap();
        road.close().await;
    }

    async fn begins_that_are_dropped_leave_no_transaction_open(db: &Fresh) {
        put_on_sale(db).await;
        for round in 0..2_000_u32 {
            let mut begin = pin!(db.begin());
            let mut polls = round % 5;
            std::future::poll_fn(|context| match begin.as_mut().poll(context) {
                Poll::Pending if polls > 0 => {
                    polls -= 1;
                    Poll::Pending
                }
                Poll::Pending | Poll::Ready(_) => Poll::Ready(()),
            })
            .await;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        let other = db.again().await;
        match db.backend() {
            Backend::Sqlite => {}
            Backend::Postgres => {
                let question = "SELECT count(*) FROM pg_stat_activity \
                     WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
                assert_eq!(ask(other.reader(), question).await, "0");
            }
            Backend::MySql => {
                // All connections of the pool at once, so that each is asked.
                let question = "SELECT CAST(@@in_transaction AS SIGNED) + SLEEP(0.3)";
                let answers = (0..5).map(|_| ask(db.reader(), question));
                assert_eq!(futures_util::future::join_all(answers).await, ["0"; 5]);
            }
        }
        write_sql(db, "UPDATE offers SET reserved = 1").await.unwrap();
        assert_eq!(the_offer(&other).await.reserved, 1);
        other.close().await.unwrap();
    }

    async fn a_dropped_transaction_is_rolled_back(db: &Fresh) {
        put_on_sale(db).await;
        for _ in 0..20 {
            let tx = db.begin().await.unwrap();
            tx.execute_unprepared("UPDATE offers SET reserved = 1").await.unwrap();
            drop(tx);
        }
        assert_eq!(the_offer(db).await.reserved, 0);
        write_sql(db, "UPDATE offers SET reserved = 2").await.unwrap();
    }

    async fn a_savepoint_saves_the_transaction_from_a_bad_row(db: &Fresh) {
        write(db, async |tx| {
            insert_ignore(tx, vec![reservation("1")]).await?;
            tx.execute_unprepared("SAVEPOINT good_rows").await?;
            let mut bad = reservation("2");
            bad.quantity = Set(0);
            let inserted = insert_ignore(tx, vec![bad]).await;
            assert_eq!(fault(inserted), SqlFault::Data);
            tx.execute_unprepared("ROLLBACK TO SAVEPOINT good_rows").await?;
            insert_ignore(tx, vec![reservation("3")]).await
        })
        .await
        .unwrap();
        assert_eq!(outbox::Entity::find().count(db.reader()).await.unwrap(), 2);
    }

    async fn the_clock_is_near_ours(db: &Fresh) {
        let before = TimeMs::now();
        let now = db.now().await.unwrap();
        let after = TimeMs::now();
        // The same machine, here.
        assert!((before.0 - 50..=after.0 + 50).contains(&now.0), "{before:?} {now:?} {after:?}");
    }

    async fn a_lease_has_one_holder_and_its_token_rises(db: &Fresh) {
        let minute = Duration::from_secs(60);
        let other = db.again().await;
        let granted = |acquired| match acquired {
            Acquired::Granted(lease) => lease,
            Acquired::Held { owner, .. } => panic!("held by {owner}"),
        };
        let first = granted(db.acquire_lease("engine", "a", minute).await.unwrap());
        assert_eq!(first.token, 1);
        let refused = other.acquire_lease("engine", "b", minute).await.unwrap();
        assert!(matches!(&refused, Acquired::Held { owner, remaining }
            if owner == "a" && *remaining > Duration::from_secs(50)), "{refused:?}");
        assert!(db.renew_lease(&first, Duration::ZERO).await.unwrap());
        let second = granted(other.acquire_lease("engine", "b", minute).await.unwrap());
        assert_eq!(second.token, 2);
        assert!(!db.renew_lease(&first, minute).await.unwrap());
        assert!(!db.release_lease(&first).await.unwrap());
        assert!(other.release_lease(&second).await.unwrap());
        let (a, b) = tokio::join!(
            db.acquire_lease("another", "a", minute),
            other.acquire_lease("another", "b", minute),
        );
        let granted = [a.unwrap(), b.unwrap()];
        let count = granted.iter().filter(|one| matches!(one, Acquired::Granted(_))).count();
        assert_eq!(count, 1, "{granted:?}");
        other.close().await.unwrap();
    }
}

/// A port that leads to a server until it is closed; then it refuses, and what was under way is
/// cut.
struct Road {
    port: u16,
    target: u16,
    task: tokio::task::JoinHandle<()>,
}

impl Road {
    async fn to(target: u16, port: u16) -> Self {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move {
            // Aborted together with this task.
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                connections.spawn(async move {
                    let mut far = tokio::net::TcpStream::connect(("127.0.0.1", target)).await?;
                    tokio::io::copy_bidirectional(&mut near, &mut far).await
                });
            }
        });
        Self { port, target, task }
    }

    async fn close(&mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
        // The aborted connections are dropped by the runtime, a little later.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What the server calls the session behind a transaction.
async fn session(tx: &Transaction) -> String {
    let question = match Backend::of(tx) {
        Backend::Postgres => "SELECT pg_backend_pid()",
        Backend::MySql | Backend::Sqlite => "SELECT CAST(CONNECTION_ID() AS SIGNED)",
    };
    ask(tx, question).await
}

async fn kill_session(db: &Database, id: &str) {
    let sql = match db.backend() {
        Backend::Postgres => format!("SELECT pg_terminate_backend({id})"),
        Backend::MySql | Backend::Sqlite => format!("KILL {id}"),
    };
    db.reader().execute_unprepared(&sql).await.unwrap();
}

async fn kill(db: &Database, tx: &Transaction) {
    kill_session(db, &session(tx).await).await;
    // The server answers before the session has ended.
    tokio::time::sleep(Duration::from_millis(100)).await;
}

#[tokio::test]
async fn memory_is_one_database_for_reads_and_writes() {
    let db = Database::open(&DatabaseSettings::at("sqlite::memory:")).await.unwrap();
    let other = Database::open(&DatabaseSettings::at("sqlite::memory:")).await.unwrap();
    db.migrate_up(None).await.unwrap();
    put_on_sale(&db).await;
    assert_eq!(the_offer(&db).await, offer());
    let orphan = write_sql(&db, "DELETE FROM activities").await;
    assert_eq!(fault(orphan), SqlFault::Data);
    assert!(!other.is_current().await.unwrap());
}

#[tokio::test]
async fn a_reader_of_sqlite_can_not_write() {
    let db = Fresh::sqlite().await;
    let written = db.reader().execute_unprepared("DELETE FROM outbox").await;
    assert!(written.unwrap_err().to_string().contains("readonly"));
}

#[tokio::test]
async fn a_folder_is_made_for_the_file_but_not_a_path() {
    let folder = tempfile::TempDir::new().unwrap();
    let at =
        |path: &str| DatabaseSettings::at(&format!("sqlite://{}/{path}", folder.path().display()));
    Database::open(&at("data/seckill.db")).await.unwrap();
    assert!(folder.path().join("data/seckill.db").exists());
    let error = Database::open(&at("dta/sales/seckill.db")).await.unwrap_err();
    assert!(matches!(&error, OpenError::Unwritable { .. }), "{error}");
    assert!(error.to_string().contains("create it yourself"), "{error}");
    assert!(!folder.path().join("dta").exists());
    // A folder where the file should be.
    let error = Database::open(&at("data")).await.unwrap_err();
    assert!(matches!(&error, OpenError::Unwritable { .. }), "{error}");
    // A file that is something else.
    std::fs::write(folder.path().join("notes.txt"), "not a database".repeat(100)).unwrap();
    let error = Database::open(&at("notes.txt")).await.unwrap_err();
    assert!(matches!(&error, OpenError::Unwritable { .. }), "{error}");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_told_in_one_line() {
    // A port that was free a moment ago.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    for scheme in ["postgres", "mysql"] {
        let settings = DatabaseSettings {
            connect_timeout_ms: 300,
            ..DatabaseSettings::at(&format!("{scheme}://shop:s3cret@127.0.0.1:{port}/seckill"))
        };
        let error = Database::open(&settings).await.unwrap_err();
        let said = format!("{error} {error:?}");
        assert!(said.contains("nothing listens there"), "{said}");
        assert!(said.contains(&port.to_string()) && !said.contains("s3cret"), "{said}");
        assert_eq!(error.to_string().lines().count(), 1);
    }
}

#[tokio::test]
async fn a_database_that_is_missing_or_closed_to_us_is_told() {
    for variable in ["SECKILL_TEST_POSTGRES_URL", "SECKILL_TEST_MYSQL_URL"] {
        let mut url = url::Url::parse(&std::env::var(variable).unwrap()).unwrap();
        url.set_path("seckill_nowhere");
        let error = Database::open(&DatabaseSettings::at(url.as_str())).await.unwrap_err();
        let said = error.to_string();
        // MariaDB does not tell a user about databases that the user may not see.
        assert!(said.contains("create it") || said.contains("refuses this user"), "{said}");
        url.set_username("nobody").unwrap();
        url.set_password(Some("s3cret")).unwrap();
        let error = Database::open(&DatabaseSettings::at(url.as_str())).await.unwrap_err();
        let said = format!("{error} {error:?}");
        assert!(said.contains("refuses this user"), "{said}");
        assert!(!said.contains("s3cret"), "{said}");
    }
}

#[tokio::test]
async fn a_silent_server_is_not_waited_for_without_end() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let settings = DatabaseSettings {
        connect_timeout_ms: 300,
        ..DatabaseSettings::at(&format!("postgres://shop@127.0.0.1:{port}/seckill"))
    };
    let error = Database::open(&settings).await.unwrap_err();
    assert!(error.to_string().contains("did not answer in time"), "{error}");
}

#[tokio::test]
async fn postgres_keeps_no_plan_that_was_made_for_an_empty_table() {
    crate::support::databases::run(Fresh::postgres().await, async |fresh: &Fresh| {
        let db = fresh.again().await;
        // What has no parameters has one plan.
        let plans = |kind: &str| {
            format!(
                "SELECT COALESCE(SUM({kind}_plans), 0)::BIGINT FROM pg_prepared_statements \
                 WHERE cardinality(parameter_types) > 0"
            )
        };
        // All of it in one session.
        let (kept, made) = write(&db, async |tx| {
            // After a handful of executions it would keep one.
            for _ in 0..20 {
                let rows = outbox::Entity::find().filter(outbox::Column::ReservationId.eq("r"));
                rows.all(tx).await?;
            }
            Ok((ask(tx, &plans("generic")).await, ask(tx, &plans("custom")).await))
        })
        .await
        .unwrap();
        assert_eq!(kept, "0");
        assert_ne!(made, "0");
        db.close().await.unwrap();
    })
    .await;
}

/// Runs one statement in a transaction that ends as it should.
async fn in_transaction(db: &Database, sql: &str) -> Result<(), DbErr> {
    let transaction = db.begin().await?;
    match transaction.execute_unprepared(sql).await {
        Ok(_) => transaction.commit().await,
        Err(error) => {
            let _ = transaction.rollback().await;
            Err(error)
        }
    }
}

#[tokio::test]
async fn what_is_committed_after_a_full_disk_is_kept() {
    let db = Fresh::sqlite().await;
    in_transaction(&db, "CREATE TABLE trial (name TEXT, filler BLOB)").await.unwrap();
    let other = db.again().await;
    let kept = async |name: &str| {
        let sql = format!("SELECT name FROM trial WHERE name = '{name}'");
        let statement = Statement::from_string(sea_orm::DbBackend::Sqlite, sql);
        other.reader().query_one_raw(statement).await.unwrap().is_some()
    };
    for turn in 0..3 {
        // Of the one connection that writes: no page more than there are.
        db.writer().execute_unprepared("PRAGMA max_page_count = 1").await.unwrap();
        let fill = "INSERT INTO trial VALUES ('filler', zeroblob(10000000))";
        let full = in_transaction(&db, fill).await.unwrap_err();
        assert!(full.to_string().contains("database or disk is full"), "{full}");
        assert_eq!(classify(&full), SqlFault::Unknown);
        assert!(!kept("filler").await);

        // Transactions that are rolled back, or given up, leave nothing behind either.
        db.begin().await.unwrap().rollback().await.unwrap();
        drop(db.begin().await.unwrap());
        let name = format!("small-{turn}");
        in_transaction(&db, &format!("INSERT INTO trial (name) VALUES ('{name}')")).await.unwrap();
        assert!(kept(&name).await, "{name} was committed, and nobody else sees it");
        // Nobody holds the lock that there is one of.
        in_transaction(&other, "UPDATE trial SET filler = NULL").await.unwrap();
    }
    other.close().await.unwrap();
    db.remove().await;
}
