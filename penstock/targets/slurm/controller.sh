give_up() { echo "penstock: $*"; exit 1; }
@prologue@
export PENSTOCK_RUN=@run@ PENSTOCK_RUN_ID="$1" PENSTOCK_ROLE=controller
until @python@ -m penstock.deployment.controller @run@ --unit "$2"; do sleep 5; done
