-- What is due is not what is parked: a run that waits for code is found by what it needs, whatever its clock says.

DROP INDEX run_due;
CREATE INDEX run_due ON run (driver, agent, wake_at) WHERE lease_owner IS NULL AND wake_at IS NOT NULL AND needs IS NULL;
